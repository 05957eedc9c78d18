"""The pytest plugin that runs in sandboxes: it writes the outcome of each test, and stops tests that take too long.

It is sent to the sandbox as a file, and uses only pytest and the standard library of Python 3.7 or later. The file
named by ``ENVKIT_REPORT`` gets one JSON object per line: ``{"test": ID, "outcome": "passed", "s": 0.01}`` for each
test, with ``"message"`` if it failed, and at last ``{"exit": CODE}``. ``ENVKIT_TEST_TIMEOUT_S`` limits each test.
"""

import json
import os
import signal
import time

import pytest

_FILE = open(os.environ["ENVKIT_REPORT"], "a", encoding="utf-8")  # noqa: PTH123, SIM115 - runs without envkit
_LIMIT_S = float(os.environ.get("ENVKIT_TEST_TIMEOUT_S", "0"))
_PROCESS = os.getpid()
_MAX_MESSAGE = 4000

_outcomes = {}
_dumps, _getpid, _clock = json.dumps, os.getpid, time.perf_counter  # noqa: TID251 - runs without envkit


def _write(row):
    if _getpid() == _PROCESS:  # not in a process that a test has forked
        _FILE.write(_dumps(row) + "\n")
        _FILE.flush()


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
            row["message"] = message[:_MAX_MESSAGE]
        _write(row)


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
        _write({"collect": report.nodeid, "message": str(report.longrepr)[-_MAX_MESSAGE:]})


def pytest_sessionfinish(session, exitstatus):
    _write({"exit": int(exitstatus)})
