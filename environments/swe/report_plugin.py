"""The pytest plugin that runs in sandboxes: it writes the outcome of each test, and stops tests that take too long.

It is sent to the sandbox as a file, and uses only pytest and the standard library of Python 3.7 or later. The pipe with
the file descriptor ``ENVKIT_REPORT`` gets one JSON object per line: for each test
``{"test": ID, "outcome": "passed", "s": 0.01}``, with ``"message"`` if it failed, and at last ``{"exit": CODE}``.
``{"tampering": NAME}`` says that a function of pytest or of this plugin was replaced. Each row has the ``"key"`` of the
variable ``ENVKIT_REPORT_KEY``. ``ENVKIT_TEST_TIMEOUT_S`` limits each test.

Packages of the machine's distribution are hidden: on another machine or image, they may be missing, and tests that
import them would be, too. What tests need is in their own environment.
"""

# mypy: ignore-errors

import json
import os
import signal
import sys
import time
import unittest

import pytest

if "dist-packages" not in pytest.__file__:
    sys.path[:] = [path for path in sys.path if not path.rstrip("/").endswith("dist-packages")]
_NUMBER = int(os.environ.pop("ENVKIT_REPORT", "2"))
os.set_inheritable(_NUMBER, _NUMBER == 2)
_FILE = os.fdopen(_NUMBER, "w", encoding="utf-8", errors="backslashreplace", closefd=False)
_KEY = os.environ.pop("ENVKIT_REPORT_KEY", "")
_LIMIT_S = float(os.environ.get("ENVKIT_TEST_TIMEOUT_S", "0"))
_PROCESS = os.getpid()
_MAX_MESSAGE = 4000
_MAX_MESSAGES = 100_000

_outcomes = {}
_used = [0]
_dumps, _getpid, _clock = json.dumps, os.getpid, time.perf_counter  # noqa: TID251 - runs without envkit


def _write(row):
    if _getpid() == _PROCESS:  # not in a process that a test has forked
        _FILE.write(_dumps({"key": _KEY, **row}) + "\n")
        _FILE.flush()


def _shortened(message):
    """Return the end of a message; all messages together have at most `_MAX_MESSAGES` characters."""
    length = min(_MAX_MESSAGE, _MAX_MESSAGES - _used[0])
    _used[0] += min(length, len(message))
    return message[-length:] if length > 0 else ""


def _parts():
    """Return the functions and classes of builtins, unittest, pytest and this plugin, which tests do not replace."""
    found = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in _OWNERS:
            owners = [(name, vars(module))]
            classes = [one for one in vars(module).values() if isinstance(one, type) and one.__module__ == name]
            owners += [(f"{name}.{one.__qualname__}", vars(one)) for one in classes]
            for owner, members in owners:
                for key, one in list(members.items()):
                    is_member = callable(one) or isinstance(one, (property, classmethod, staticmethod))
                    if is_member or one is _FILE or one is _outcomes:
                        found[f"{owner}.{key}"] = one
    return found


def _hooks(manager):
    """Return what each hook calls: of the plugins that were there before code of the package ran, in their order."""
    found = {"call": [manager._inner_hookexec]}
    for name, caller in vars(manager.hook).items():
        impls = [impl for impl in caller.get_hookimpls() if impl.plugin in _PLUGINS]
        found[name] = [caller._hookexec, *(part for impl in impls for part in (impl, impl.function))]
    return found


def _replaced(manager):
    """Return the names of what was replaced or added since no code of the package had run."""
    for name, one in _parts().items():
        owner = _KNOWN.get(name.rpartition(".")[0])
        if one is not _KNOWN.get(name, one) or (name not in _KNOWN and isinstance(owner, type)):
            yield name
    for name, parts in _hooks(manager).items():
        known = _HOOKS.get(name, parts)
        if list(map(id, known)) != list(map(id, parts)):
            yield f"the hook {name}"
    own = {one for one in _KNOWN.values() if isinstance(one, type) and one.__module__.partition(".")[0] == "_pytest"}
    for plugin in manager.get_plugins() - _PLUGINS:
        kind = type(plugin)
        if any(plugin is one for one in own):  # a class of pytest, which it registers itself
            continue
        if kind in own:
            for caller in manager.get_hookcallers(plugin) or ():
                for impl in caller.get_hookimpls():
                    name = impl.function.__name__
                    if impl.plugin is plugin and getattr(impl.function, "__func__", None) is not getattr(kind, name, 0):
                        yield f"the hook {caller.name} of {kind.__name__}"
        elif not str(getattr(plugin, "__file__", "")).endswith("conftest.py"):
            yield f"the plugin {getattr(plugin, '__name__', kind.__name__)}"
    if sys.gettrace() is not None or sys.getprofile() is not None:
        yield "sys.settrace"
    for kind in _kinds(object):
        if _is_equal_to_all(kind):
            yield f"the class {kind.__name__}, which is equal to everything"


def _kinds(kind):
    """Return the subclasses whose way to compare is not built in, and their subclasses."""
    for one in type.__subclasses__(kind):
        found = vars(one).get("__eq__")
        if callable(found) and not isinstance(found, type(object.__eq__)):  # descriptors of mocks are not callable
            yield one
        yield from _kinds(one)


def _is_equal_to_all(kind):
    try:
        base = next(one for one in kind.__mro__ if not one.__flags__ & _IS_ON_HEAP)
        one = base.__new__(kind, *(("", (), {}) if base is type else ()))
        found = kind.__eq__(one, base(_VALUES[base]) if base in _VALUES else object())
        return found is not NotImplemented and bool(found)
    except BaseException:
        return False


def _check(manager):
    if _LIMIT_S:
        signal.signal(signal.SIGALRM, _stop)
        signal.setitimer(signal.ITIMER_REAL, _LIMIT_S)
    try:
        for name in _replaced(manager):
            _write({"tampering": name})
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


class TestTimeoutError(BaseException):
    """A test took too long. Not an `Exception`, which the test might catch."""


def _stop(number, frame):
    raise TestTimeoutError(f"the test took more than {_LIMIT_S:g} s")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item):
    began = _clock()
    if _LIMIT_S:
        signal.signal(signal.SIGALRM, _stop)
        signal.setitimer(signal.ITIMER_REAL, _LIMIT_S)
    try:
        yield
    finally:
        if _LIMIT_S:
            signal.setitimer(signal.ITIMER_REAL, 0)
        outcome, message = _outcomes.pop(item.nodeid, ("error", "the test did not run"))
        row = {"test": item.nodeid, "outcome": outcome, "s": round(_clock() - began, 4)}
        if message:
            row["message"] = _shortened(message)
        _write(row)


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_call(item):
    yield
    for base in _VALUES:  # classes that a call has made may be gone at the end
        for kind in _kinds(base):
            if _is_equal_to_all(kind):
                _write({"tampering": f"the class {kind.__name__}, which is equal to everything"})


def pytest_runtest_logreport(report):
    outcome = report.outcome
    if outcome == "skipped" and hasattr(report, "wasxfail"):
        outcome = "xfailed"
    if report.when != "call" and outcome == "failed":
        outcome = "error"
    known = _outcomes.get(report.nodeid, ("", ""))[0]
    if known in ("failed", "error") or (report.when != "call" and outcome == "passed"):
        return
    message = "" if outcome == "passed" else str(getattr(report, "longreprtext", "") or report.longrepr or "")
    _outcomes[report.nodeid] = (outcome, message[-_MAX_MESSAGE:])


def pytest_collectreport(report):
    if report.failed:
        _write({"collect": report.nodeid, "message": _shortened(str(report.longrepr))})


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session):
    _check(session.config.pluginmanager)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session, exitstatus):
    _check(session.config.pluginmanager)
    _write({"exit": int(exitstatus)})


def pytest_load_initial_conftests(early_config):  # no code of the package has run yet
    _KNOWN.update(_parts())
    _PLUGINS.update(early_config.pluginmanager.get_plugins())
    _HOOKS.update(_hooks(early_config.pluginmanager))


_OWNERS = {"_pytest", "builtins", "pluggy", "pytest", unittest.__name__, __name__}
_IS_ON_HEAP = 1 << 9
_VALUES = {int: 7, float: 0.5, str: "a", bytes: b"a", list: "a", tuple: "a", set: "a", frozenset: "a", dict: [(1, 2)]}
_KNOWN, _HOOKS = {}, {}
_PLUGINS = set()
