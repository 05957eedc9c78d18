"""The agent runs programs: it returns their output, bounds them, and leaves no process behind."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.sandbox.agent.agent_process import Client, started, wait_until_gone

as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become other users")


@pytest.fixture
def sandbox(tmp_path: Path) -> Iterator[Client]:
    with started(tmp_path) as client:
        yield client


@pytest.fixture
def users_sandbox() -> Iterator[Client]:
    """A sandbox with its own users, in a folder that all users may enter."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o777)
        with started(Path(folder), agent_uid=1000, grader_uid=1001) as client:
            yield client


def test_a_program_without_its_main_thread_is_killed_at_the_timeout(sandbox: Client, tmp_path: Path) -> None:
    script = """
import ctypes, os, threading, time
def go_on():
    while True:
        with open("alive", "a") as file:
            file.write("x")
        time.sleep(0.01)
threading.Thread(target=go_on).start()
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[os.uname().machine], 0)  # ends the thread that calls it
"""
    answer = sandbox.exec(sys.executable, "-c", script, timeout_s=3)
    assert (answer["code"], answer["timed_out"]) == (None, True)
    written = (tmp_path / "alive").stat().st_size
    assert written > 0
    sandbox.exec("sleep", "0.2")
    assert (tmp_path / "alive").stat().st_size == written


def test_of_100_megabytes_the_last_one_is_kept(sandbox: Client) -> None:
    answer = sandbox.sh("yes | head -c 100000000; echo end", keep_bytes=1 << 20, timeout_s=60)
    assert answer["code"] == 0
    assert answer.out == b"y\n" * ((1 << 19) - 2) + b"end\n"
    assert answer["cut"] == 100_000_004 - (1 << 20)
    memory = Path(f"/proc/{sandbox.pid}/status").read_text()
    peak_kib = int(memory.split("VmHWM:")[1].split()[0])
    assert peak_kib < 64 << 10


def test_a_command_that_kills_its_lane_is_reported_and_leaves_no_process(
    sandbox: Client, marker: str, sleepers: Callable[[], int]
) -> None:
    answer = sandbox.sh(f"setsid sleep {marker} & kill -9 $PPID; sleep {marker}")
    assert answer["code"] == -9
    assert sleepers() == 0
    assert sandbox.exec("echo", "next").out == b"next\n"


def test_a_stopped_lane_does_not_outlive_the_timeout(sandbox: Client, marker: str, sleepers: Callable[[], int]) -> None:
    answer = sandbox.sh(f"kill -STOP $PPID; sleep {marker}", timeout_s=0.3)
    assert (answer["timed_out"], sleepers()) == (True, 0)


def test_a_tree_of_respawning_programs_ends_with_its_call(
    sandbox: Client, marker: str, sleepers: Callable[[], int]
) -> None:
    script = f"""again() {{ while :; do sleep {marker}; done; }}
    tree() {{ if [ "$1" -gt 0 ]; then tree $(($1 - 1)) & tree $(($1 - 1)) & wait; else again; fi; }}
    tree 5"""
    number = sandbox.start("exec", argv=["bash", "-c", script], timeout_s=60)
    while sleepers() < 32:  # on a busy machine, a timeout could come before the last of them
        assert sandbox.call("ping")["end"] is True
    sandbox.send({"id": number, "cancel": True})
    assert sandbox.answer(number)["end"] is True
    assert sleepers() == 0


def test_streamed_output_comes_while_the_program_runs(sandbox: Client) -> None:
    number = sandbox.start("exec", argv=["cat"], timeout_s=20, stdin=True, stream=True)
    for piece in (b"one", b"four"):
        sandbox.feed(number, piece, end=False)
        assert sandbox.next(number) == ({"id": number, "ack": len(piece)}, b"")
        assert sandbox.next(number) == ({"id": number, "of": "out"}, piece)
    sandbox.send({"id": number, "eof": True})
    assert sandbox.answer(number)["code"] == 0


def test_input_that_a_program_no_longer_reads_is_still_acknowledged(sandbox: Client) -> None:
    script = "exec <&-; echo closed; sleep 20"
    number = sandbox.start("exec", argv=["sh", "-c", script], timeout_s=20, stdin=True, stream=True)
    assert sandbox.next(number)[1] == b"closed\n"
    for _ in range(3):  # the first finds out that nobody reads
        sandbox.feed(number, b"lost", end=False)
    assert sandbox.next(number) == ({"id": number, "ack": 4}, b"")
    sandbox.send({"id": number, "cancel": True})
    assert sandbox.answer(number)["end"] is True


def test_a_client_that_does_not_read_does_not_fill_the_agents_memory(sandbox: Client) -> None:
    number = sandbox.start("exec", argv=["sh", "-c", "yes | head -c 100000000"], timeout_s=60, stream=True)
    ping = sandbox.start("ping")
    total, pinged = 0, False
    while True:
        header, body = sandbox.frame()
        total += len(body)
        pinged = pinged or header["id"] == ping
        if header["id"] == number and "end" in header:
            break
    assert (total, pinged) == (100_000_000, True)
    peak_kib = int(Path(f"/proc/{sandbox.pid}/status").read_text().split("VmHWM:")[1].split()[0])
    assert peak_kib < 64 << 10


def test_a_terminal_has_the_requested_size(sandbox: Client) -> None:
    answer = sandbox.sh("tty -s && stty size && echo x > /dev/tty", pty=[31, 97])
    assert (answer["code"], answer.out, answer.err) == (0, b"31 97\r\nx\r\n", b"")


def test_a_terminal_can_be_resized_and_typed_into(sandbox: Client) -> None:
    script = "trap 'stty size' WINCH; echo up; read x; read y; echo got $y"
    number = sandbox.start("exec", argv=["bash", "-c", script], timeout_s=20, pty=[10, 20], stream=True)
    assert sandbox.next(number)[1] == b"up\r\n"
    assert sandbox.call("resize", of=number, rows=40, cols=50)["end"] is True
    sandbox.feed(number, b"a\nb\n", end=False)
    answer = sandbox.answer(number)
    assert answer["code"] == 0
    assert b"40 50\r\n" in answer.out
    assert answer.out.endswith(b"got b\r\n")


def test_control_c_in_a_terminal_interrupts(sandbox: Client) -> None:
    number = sandbox.start("exec", argv=["cat"], timeout_s=20, pty=[10, 20], stream=True)
    sandbox.feed(number, b"up\n", end=False)
    seen = b""
    while seen.count(b"up\r\n") < 2:  # the terminal's echo, then the output of the program itself
        seen += sandbox.next(number)[1]
    sandbox.feed(number, b"\x03", end=False)
    assert sandbox.answer(number)["code"] == -signal.SIGINT


def test_root_is_unsupported_unless_the_configuration_allows_it(sandbox: Client, tmp_path: Path) -> None:
    assert sandbox.exec("id", user="root")["error"] == "unsupported"


@as_root
def test_programs_run_as_the_users_of_the_sandbox_without_privileges(users_sandbox: Client) -> None:
    status = users_sandbox.exec("cat", "/proc/self/status").out.decode()
    lines = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert (lines["Uid"].split(), lines["Groups"].strip()) == (["1000"] * 4, "")
    assert {lines[f"Cap{kind}"] for kind in ("Inh", "Prm", "Eff", "Bnd", "Amb")} == {"0" * 16}
    assert lines["NoNewPrivs"] == "1"
    assert users_sandbox.exec("id", "-u", user="grader").out == b"1001\n"
    assert users_sandbox.exec("sh", "-c", "cat /proc/self/oom_score_adj; ulimit -c").out == b"1000\n0\n"


@as_root
def test_programs_can_neither_kill_nor_read_the_agent(users_sandbox: Client) -> None:
    answer = users_sandbox.sh(
        f"kill -9 {users_sandbox.pid}; cat /proc/{users_sandbox.pid}/environ; ls /proc/{users_sandbox.pid}/fd"
    )
    assert (answer["code"] != 0, answer.out) == (True, b"")
    assert users_sandbox.call("ping")["end"] is True


@as_root
def test_a_user_owns_its_terminal(users_sandbox: Client) -> None:
    assert users_sandbox.sh('stat -c %u "$(tty)"', pty=[10, 20]).out == b"1000\r\n"


def test_the_agents_death_ends_its_programs(sandbox: Client, marker: str, sleepers: Callable[[], int]) -> None:
    number = sandbox.start("exec", argv=["sh", "-c", f"echo $$; exec sleep {marker}"], timeout_s=60, stream=True)
    pid = int(sandbox.next(number)[1])
    os.kill(sandbox.pid, signal.SIGKILL)
    assert wait_until_gone(pid)
    assert sleepers() == 0
