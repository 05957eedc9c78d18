"""Runs of a package's tests in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from envkit.errors import MissingFileError, TooLargeError
from envkit.protocols import Sandbox
from envkit.types import ExecResult, SandboxSpec, SandboxUser

REPO = "/workspace/repo"
"""Folder of the package in a sandbox."""
ENVIRONMENT = "/opt/envkit-tests"
"""Folder of the tests' environment (pytest and what the tests import) in a sandbox."""
TEST_TIMEOUT_S = 30.0

_PLUGIN = Path(__file__).with_name("report_plugin.py").read_text(encoding="utf-8")
_TOOLS = "/workspace/.envkit-run"
_MAX_REPORT = 64 << 20
_EPOCH = "2024-01-15 12:00:00"
"""Time at which programs in a sandbox begin, if it has libfaketime."""
_FAKETIME = "/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1"


def spec_of(environment: Path | None, *, image: str | None = None) -> SandboxSpec:
    """Return the spec of a sandbox for a package: without a network, and with fixed time zone, locale and hash seed.

    Args:
        environment: Folder of the tests' environment on this machine; None if `image` contains it.
        image: The image; None means the backend's default.
    """
    paths = [f"{REPO}/src", REPO, f"{REPO}/lib", *([ENVIRONMENT] if environment else [])]
    variables = {
        "PYTHONPATH": ":".join(paths),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",
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
        result: Result of the command.
    """

    outcomes: Mapping[str, str]
    messages: Mapping[str, str]
    seconds: Mapping[str, float]
    exit_code: int | None
    result: ExecResult

    @property
    def passed(self) -> frozenset[str]:
        return frozenset(test for test, outcome in self.outcomes.items() if outcome in ("passed", "xfailed"))


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
    """

    timeout_s: float = 600.0
    test_timeout_s: float = TEST_TIMEOUT_S
    hash_seed: int = 0
    user: SandboxUser = "agent"
    arguments: Sequence[str] = ()
    python: Sequence[str] = field(default=())


async def run_tests(sandbox: Sandbox, tests: Sequence[str] = (), settings: RunSettings = RunSettings()) -> TestRun:
    """Run tests of the package in `REPO`; all tests if `tests` is empty.

    Raises:
        SandboxLostError: The sandbox was lost, for example because a test used up its memory.
    """
    report = f"{_TOOLS}/report-{settings.hash_seed}.jsonl"
    await sandbox.exec(["rm", "-rf", _TOOLS])
    await sandbox.write(f"{_TOOLS}/envkit_report_plugin.py", _PLUGIN.encode())
    variables = {
        "PYTHONHASHSEED": str(settings.hash_seed),
        "ENVKIT_REPORT": report,
        "ENVKIT_TEST_TIMEOUT_S": str(settings.test_timeout_s),
    }
    assign = " ".join(f"{name}={value}" for name, value in variables.items())
    options = ("-q", "--tb=short", "-p", "no:cacheprovider", "-p", "envkit_report_plugin", "-o", "addopts=")
    command = [*settings.python, "-m", "pytest", *options, *settings.arguments, *tests]
    script = (
        f'cd {REPO} && export {assign} PYTHONPATH="$PYTHONPATH:{_TOOLS}"; if [ -e {_FAKETIME} ]; then export '
        f'LD_PRELOAD={_FAKETIME} FAKETIME="@{_EPOCH}" FAKETIME_DONT_FAKE_MONOTONIC=1; fi; exec python3 "$@"'
    )
    result = await sandbox.exec(
        ["sh", "-c", script, "python3", *command],
        timeout_s=settings.timeout_s,
        user=settings.user,
        max_output_bytes=1 << 16,
    )
    try:
        content = await sandbox.read(report, max_bytes=_MAX_REPORT)
    except (MissingFileError, TooLargeError):
        content = b""
    return read_report(content, result)


def read_report(content: bytes, result: ExecResult) -> TestRun:
    """Return the run that a report of the plugin describes. Lines that are no valid rows are skipped."""
    outcomes: dict[str, str] = {}
    messages: dict[str, str] = {}
    seconds: dict[str, float] = {}
    exit_code: int | None = None
    for line in content.decode(errors="replace").splitlines():
        try:
            row = json.loads(line)
            name = row.get("test", row.get("collect"))
            if "exit" in row:
                exit_code = int(row["exit"])
            elif "test" in row:
                outcomes[str(name)], seconds[str(name)] = str(row["outcome"]), float(row["s"])
            if "message" in row:
                messages[str(name)] = str(row["message"])
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            continue
    return TestRun(outcomes, messages, seconds, exit_code, result)
