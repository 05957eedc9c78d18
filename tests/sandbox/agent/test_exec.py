"""The agent runs programs: it returns their output, bounds them, and leaves no process behind."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.sandbox.agent.agent_process import Client, started


@pytest.fixture
def sandbox(tmp_path: Path) -> Iterator[Client]:
    with started(tmp_path) as client:
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


def test_a_terminal_has_the_requested_size_and_can_be_resized_and_typed_into(sandbox: Client) -> None:
    script = "stty size; echo x > /dev/tty; trap 'stty size' WINCH; echo up; read x; read y; echo got $y"
    number = sandbox.start("exec", argv=["bash", "-c", script], timeout_s=20, pty=[10, 20], stream=True)
    seen = b""
    while not seen.endswith(b"up\r\n"):
        seen += sandbox.next(number)[1]
    assert seen == b"10 20\r\nx\r\nup\r\n"
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
