"""Runs of a package's tests in a sandbox."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from envkit import clock
from envkit.protocols import Sandbox
from envkit.types import ExecResult, SandboxSpec, SandboxUser

REPO = "/workspace/repo"
"""Folder of the package in a sandbox."""
ENVIRONMENT = "/opt/envkit-tests"
"""Folder of the tests' environment (pytest and what the tests import) in a sandbox."""
_IN_IMAGE = "/opt/packages"
"""Folder of the packages in an image of ``envkit image build python``."""
TEST_TIMEOUT_S = 30.0
TEST_PATH = re.compile(r"(^|/)(tests?|testing)/|(^|/)(test_[^/]*|[^/]*_test|tests?|conftest)\.py$")
"""Matches the paths of tests and their helpers, which are not source of a package."""

_PLUGIN = Path(__file__).with_name("report_plugin.py").read_text(encoding="utf-8")
_TOOLS = "/workspace/.envkit-run"
_ROW = re.compile(rb'^{"key".*', re.MULTILINE)
_MAX_TAMPERING = 100
_EPOCH = "2024-01-15 12:00:00"
"""Time at which programs in a sandbox begin, if it has libfaketime."""
_FAKETIME = "/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1"


def spec_of(environment: Path | None, *, image: str | None = None) -> SandboxSpec:
    """Return the spec of a sandbox for a package: without a network, and with fixed time zone, locale and hash seed.

    `environment` is the folder of the tests' environment on this machine; None if `image` contains it.
    """
    paths = [f"{REPO}/src", REPO, f"{REPO}/lib", ENVIRONMENT if environment else _IN_IMAGE]
    variables = {
        "PYTHONPATH": ":".join(paths),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",
        "PYTEST_ADDOPTS": "-o addopts=",  # the package's own options may need plugins
        "TZ": "UTC",
        "LC_ALL": "C.UTF-8",
    }
    views = ((str(environment), ENVIRONMENT),) if environment else ()
    return SandboxSpec(image=image, env=variables, views=views, untrusted=True)


@dataclass(frozen=True, slots=True)
class TestRun:
    """The result of a run of tests.

    Attributes:
        outcomes: Outcome by the id of the test: ``passed``, ``failed``, ``error``, ``skipped`` or ``xfailed``.
        messages: Why tests did not pass, by their ids, and why files could not be collected.
        seconds: Seconds of each test.
        exit_code: Exit code that pytest reported; None if it did not come to its end.
        tampering: Signs that the source deceives the grader: forged rows, and classes that are equal to everything.
        result: Result of the command. Its standard output is the report, and its standard error all other output.
    """

    outcomes: Mapping[str, str]
    messages: Mapping[str, str]
    seconds: Mapping[str, float]
    exit_code: int | None
    tampering: tuple[str, ...]
    result: ExecResult

    @property
    def passed(self) -> frozenset[str]:
        return frozenset(test for test, outcome in self.outcomes.items() if outcome == "passed")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """Settings of a run.

    Attributes:
        timeout_s: Maximum seconds of the whole run.
        test_timeout_s: Maximum seconds of one test.
        hash_seed: Value of ``PYTHONHASHSEED``.
        user: User that runs the tests.
        arguments: More arguments of pytest.
        python: More arguments of Python, before ``-m pytest``.
        max_report: Maximum bytes of the report. A run with a larger one has no results.
    """

    timeout_s: float = 600.0
    test_timeout_s: float = TEST_TIMEOUT_S
    hash_seed: int = 0
    user: SandboxUser = "agent"
    arguments: Sequence[str] = ()
    python: Sequence[str] = ()
    max_report: int = 16 << 20


async def run_tests(sandbox: Sandbox, tests: Sequence[str] = (), settings: RunSettings = RunSettings()) -> TestRun:
    """Run tests of the package in `REPO`; all tests if `tests` is empty.

    Files that cannot be collected, for example because an import fails, are left out.

    Raises:
        SandboxLostError: The sandbox was lost, for example because a test used up its memory.
    """
    await sandbox.exec(["rm", "-rf", _TOOLS])
    await sandbox.write(f"{_TOOLS}/envkit_report_plugin.py", _PLUGIN.encode())
    key = secrets.token_hex(8)
    variables = {
        "PYTHONHASHSEED": str(settings.hash_seed),
        "ENVKIT_REPORT": "3",
        "ENVKIT_REPORT_KEY": key,
        "ENVKIT_TEST_TIMEOUT_S": str(settings.test_timeout_s),
    }
    assign = " ".join(f"{name}={value}" for name, value in variables.items())
    options = ("-q", "--tb=short", "--continue-on-collection-errors")
    plugins = ("-p", "no:cacheprovider", "-p", "envkit_report_plugin")
    command = [*settings.python, "-m", "pytest", *options, *plugins, *settings.arguments, *tests]
    script = (
        f'cd {REPO} && export {assign} PYTHONPATH="$PYTHONPATH:{_TOOLS}"; if [ -e {_FAKETIME} ]; then export '
        f'LD_PRELOAD={_FAKETIME} FAKETIME="@{_EPOCH}" FAKETIME_DONT_FAKE_MONOTONIC=1; fi; exec python3 "$@" 3>&1 1>&2'
    )
    result = await sandbox.exec(
        ["sh", "-c", script, "python3", *command],
        timeout_s=settings.timeout_s,
        user=settings.user,
        max_output_bytes=settings.max_report,
    )
    if len(result.stdout_bytes) >= settings.max_report:  # the first rows, which count, may be lost
        result = replace(result, stdout_bytes=b"")
    return await clock.to_thread(read_report, result, key)


def read_report(result: ExecResult, key: str) -> TestRun:
    """Read a run from the result of its command, whose output is the report of the plugin.

    Lines that are no valid rows are skipped, and so are rows without the key of the run. The first row about a test
    counts, because code in the sandbox can add rows, but cannot change earlier ones.
    """
    outcomes: dict[str, str] = {}
    messages: dict[str, str] = {}
    seconds: dict[str, float] = {}
    tampering: list[str] = []
    exit_code: int | None = None
    for line in _ROW.findall(result.stdout_bytes):
        try:
            row = json.loads(line)
            if row.get("key") != key:
                tampering.append("a row that the plugin did not write")
                continue
            name = str(row.get("test", row.get("collect")))
            if "exit" in row:
                exit_code = int(row["exit"]) if exit_code is None else exit_code
            elif "tampering" in row:
                tampering.append(str(row["tampering"])[:200])
            elif name in outcomes:
                tampering.append(f"a second result of {name}")
                continue
            elif "test" in row:
                outcomes[name], seconds[name] = str(row["outcome"]), float(row["s"])
            if "message" in row:
                messages[name] = str(row["message"])
        except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError):
            continue
    return TestRun(outcomes, messages, seconds, exit_code, tuple(tampering[:_MAX_TAMPERING]), result)
