"""``envkit sandbox``, as a user types it."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shlex
import signal
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from envkit import clock
from envkit.sandbox.bubblewrap.backend import LocalBackend
from envkit.types import SandboxSpec
from tests.cli.commands import called, envkit
from tests.contract.kinds import new_marker
from tests.programs.program import SCRIPT

pytestmark = pytest.mark.bwrap

QUOTED = shlex.quote(str(SCRIPT))

sandbox, called_sandbox = partial(envkit, "sandbox"), partial(called, "sandbox")


@pytest.fixture
def detached() -> Iterator[str]:
    _, sandbox_id, _ = sandbox("run", "--backend", "local", "-d", "--", "sh", "-c", "echo ready >&2; exec sleep 600")
    yield sandbox_id.strip()
    called_sandbox("rm", sandbox_id.strip())


def test_output_input_and_exit_code_are_the_programs() -> None:
    program = "tr a-z A-Z; echo odd >&2; exit 7"
    assert sandbox("run", "--backend", "local", "--", "sh", "-c", program, stdin="abc") == (7, "ABC", "odd\n")


def test_output_comes_while_the_program_runs() -> None:
    words = [SCRIPT, "sandbox", "run", "--backend", "local", "--", "sh", "-c", "echo first; read line; echo $line"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "first\n"
        process.stdin.write("second\n")
        process.stdin.close()
        assert process.stdout.read() == "second\n"
    assert process.returncode == 0


def test_a_timeout_is_124_and_a_signal_128_more() -> None:
    assert sandbox("run", "--backend", "local", "--timeout-s", "0.5", "--", "sleep", "60") == (
        124,
        "",
        "stopped after 0.5 s\n",
    )
    assert sandbox("run", "--backend", "local", "--", "sh", "-c", "kill -9 $$")[0] == 137


def test_a_lost_sandbox_is_125_with_the_cause_as_message() -> None:
    code, _, message = sandbox("run", "--backend", "local", "--ttl-s", "3", "--", "sleep", "60")
    assert (code, message) == (125, "sandbox bwrap-1 lost: time to live exceeded\n")


def test_a_closed_output_pipe_ends_the_command_without_an_error() -> None:
    shell = f"{QUOTED} sandbox run --backend local -- yes </dev/null | head -1"
    done = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("y\n", "")


def test_a_program_that_reads_late_gets_all_of_its_input() -> None:
    mib = 100  # more than is kept inside for a program that does not read
    shell = f"head -c {mib << 20} /dev/zero | {QUOTED} sandbox run --backend local -- sh -c 'sleep 1; wc -c'"
    done = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{mib << 20}\n", "")


@pytest.mark.parametrize(("closed", "out", "err"), [("<&- 2>&-", "out\n", ""), (">&-", "", "err\n")])
def test_a_standard_file_that_is_closed_is_empty(closed: str, out: str, err: str) -> None:
    shell = f"{QUOTED} sandbox run --backend local -- sh -c 'cat; echo out; echo err >&2' {closed}"
    done = subprocess.run(
        ["sh", "-c", shell], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, out, err)


def test_limits_and_files_are_the_requested_ones(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "one").write_text("1")
    words = ("--env", "COLOUR=a=b", "--upload", f"{tmp_path}/notes:there", "--disk-mib", "1")
    program = "echo $COLOUR $(cat there/one); head -c 9000000 /dev/zero >big 2>/dev/null || echo full"
    assert sandbox("run", "--backend", "local", *words, "--", "sh", "-c", program) == (0, "a=b 1\nfull\n", "")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_a_signal_ends_the_program_and_leaves_nothing(number: signal.Signals, code: int) -> None:
    marker = new_marker()
    program = f"trap '' INT TERM HUP; (setsid sleep {marker} &); echo up; sleep {marker}; sleep {marker}"
    words = [SCRIPT, "sandbox", "run", "--backend", "local", "--", "sh", "-c", program]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(number)
        try:
            _, stderr = process.communicate(timeout=120)
        finally:
            process.kill()
    assert (process.returncode, stderr) == (code, "")
    deadline = clock.stopwatch() + 20
    while _count(marker):
        assert clock.stopwatch() < deadline


@pytest.mark.detached
def test_a_detached_sandbox_is_used_from_other_processes_until_it_is_removed(detached: str) -> None:
    assert detached.startswith("bwrap-")
    assert sandbox("exec", detached, "--", "sh", "-c", "echo kept >note; exit 5") == (5, "", "")
    assert sandbox("exec", detached, "cat", "note") == (0, "kept\n", "")
    assert called_sandbox("logs", detached) == (0, "ready\n", "")
    headings, *rows = [re.split("  +", line) for line in called_sandbox("ls")[1].splitlines()]
    assert headings == ["ID", "AGE", "PROCESSES", "MEMORY", "NOTE"]
    (row,) = [row for row in rows if row[0] == detached]
    assert re.fullmatch(r"\d+ s", row[1])
    assert int(row[2]) >= 1
    (listed,) = [one for one in json.loads(called_sandbox("ls", "--json")[1]) if one["id"] == detached]
    assert (listed["problem"], listed["of_server"]) == ("", False)
    missing = "there is no detached sandbox 'bwrap-nothere1' on this machine\n"
    assert called_sandbox("rm", "bwrap-nothere1", detached) == (1, "", missing)
    assert detached not in called_sandbox("ls")[1]
    assert sandbox("exec", detached, "true")[0] == 1


def test_a_sandbox_of_a_server_is_listed_only_with_all() -> None:
    async def main() -> None:
        async with LocalBackend() as backend:
            served = await backend.start(SandboxSpec(detached=True, orphan_ttl_s=60, ledger="a-servers"))
            try:
                left = await clock.to_thread(called_sandbox, "ls")
                every = await clock.to_thread(called_sandbox, "ls", "--all")
                assert served.id not in left[1]
                (line,) = [one for one in every[1].splitlines() if served.id in one]
                assert line.endswith("  of a server")
            finally:
                await served.stop()

    clock.run(main)


def test_without_a_program_there_is_a_shell_on_the_terminal() -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(SCRIPT, [SCRIPT, "sandbox", "run", "--backend", "local"])
    _until(terminal, b"$ ")
    os.write(terminal, b"sh -c 'tty; exec sleep 86416'\n")
    _until(terminal, b"/dev/pts/0")
    os.write(terminal, b"\x03")
    _until(terminal, b"$ ")
    os.write(terminal, b"exit 4\n")
    _until(terminal, b"exit\r\n")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 4
    os.close(terminal)


def _until(terminal: int, wanted: bytes) -> None:
    """Read what the terminal shows until `wanted` is there."""
    seen, deadline = b"", clock.stopwatch() + 20
    while wanted not in seen:
        assert clock.stopwatch() < deadline, seen
        if select.select([terminal], [], [], 0.1)[0]:
            seen += os.read(terminal, 4096)


def _count(argument: str) -> int:
    found = subprocess.run(["ps", "ax", "-o", "args"], capture_output=True, text=True, check=True).stdout
    return sum(line.endswith(f"sleep {argument}") for line in found.splitlines())
