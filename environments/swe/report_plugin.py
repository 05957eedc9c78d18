"""The pytest plugin that runs in sandboxes: it writes the outcome of each test, and stops tests that take too long.

It is sent to the sandbox as a file, and uses only pytest and the standard library of Python 3.7 or later. The pipe with
the file descriptor ``ENVKIT_REPORT`` gets one JSON object per line: for each test
``{"test": ID, "outcome": "passed", "s": 0.01}``, with ``"message"`` if it failed, and at last ``{"exit": CODE}``.
``{"tampering": NAME}`` names a class whose instances are equal to everything. Each row has the ``"key"`` of the
variable ``ENVKIT_REPORT_KEY``. ``ENVKIT_TEST_TIMEOUT_S`` limits each test.

Packages of the machine's distribution are hidden: on another machine or image, they may be missing, and then the tests
that import them would not run. What tests need is in their own environment.
"""

# mypy: ignore-errors

import json
import os
import signal
import sys
import time

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


def _kinds(kind):
    """Return the classes below `kind` that have their own ``__eq__``, not one that is built in."""
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


def _report_equal_to_all(*bases):
    for base in bases:
        for kind in _kinds(base):
            if _is_equal_to_all(kind):
                _write({"tampering": f"the class {kind.__name__}, which is equal to everything"})


class TestTimeoutError(BaseException):
    """A test took too long. This is no subclass of `Exception`, because a test might catch those."""


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
    _report_equal_to_all(*_VALUES)  # now: classes that a test has made may be gone at the end


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
def pytest_sessionfinish(session, exitstatus):
    if _LIMIT_S:
        signal.signal(signal.SIGALRM, _stop)
        signal.setitimer(signal.ITIMER_REAL, _LIMIT_S)
    try:
        _report_equal_to_all(object)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    _write({"exit": int(exitstatus)})


_IS_ON_HEAP = 1 << 9
_VALUES = {int: 7, float: 0.5, str: "a", bytes: b"a", list: "a", tuple: "a", set: "a", frozenset: "a", dict: [(1, 2)]}
