"""The agent's channel: frames, malformed input, and how the agent ends."""

from __future__ import annotations

import random
import signal
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.sandbox.agent.agent_process import Client, config, encoded, started, wait_until_gone


@pytest.fixture
def sandbox(tmp_path: Path) -> Iterator[Client]:
    with started(tmp_path) as client:
        yield client


def test_frames_may_be_split_anywhere(sandbox: Client) -> None:
    frames = b"".join(encoded({"id": n, "do": "ping", "filling": "\u00e9" * n}) for n in range(1, 40))
    chance = random.Random(7)
    while frames:
        size = chance.choice((1, 2, 3, 7, 50))
        sandbox.line.sendall(frames[:size])
        frames = frames[size:]
    assert [sandbox.frame()[0]["id"] for _ in range(39)] == list(range(1, 40))


GARBAGE = {
    "long header": struct.pack(">II", (1 << 20) + 1, 0),
    "long body": struct.pack(">II", 2, (1 << 16) + 1) + b"{}",
    "not json": struct.pack(">II", 4, 0) + b"nope",
    "not utf-8": struct.pack(">II", 4, 0) + b'"\xff\xfe"',
    "not an object": encoded([]),  # type: ignore[arg-type]
    "no id": encoded({"do": "ping"}),
    "an id that is not a number": encoded({"id": "x", "do": "ping"}),
    "deeply nested": struct.pack(">II", 200_000, 0) + b"[" * 200_000,
    "text": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
}


@pytest.mark.parametrize("name", GARBAGE)
def test_a_malformed_frame_ends_the_agent(sandbox: Client, name: str, marker: str, sleepers: Callable[[], int]) -> None:
    sandbox.start("exec", argv=["sleep", marker], timeout_s=60)
    sandbox.line.sendall(GARBAGE[name])
    assert sandbox.is_at_end()
    assert sandbox.process is not None
    assert sandbox.process.wait(20) == 3
    assert sandbox.process.stderr is not None
    assert b"broken frame" in sandbox.process.stderr.read()
    assert sleepers() == 0


def test_invalid_calls_are_refused_and_the_agent_keeps_running(sandbox: Client) -> None:
    wrong: list[dict[str, Any]] = [
        {"do": "exec"},
        {"do": "exec", "argv": "ls", "timeout_s": 1},
        {"do": "exec", "argv": [1], "timeout_s": 1},
        {"do": "exec", "argv": ["echo", "a\0b"], "timeout_s": 1},
        {"do": "exec", "argv": ["ls"], "timeout_s": "x"},
        {"do": "exec", "argv": ["ls"], "timeout_s": 1, "env": {"A=B": "c"}},
        {"do": "exec", "argv": ["ls"], "timeout_s": 1, "env": ["A"]},
        {"do": "exec", "argv": ["ls"], "timeout_s": 1, "pty": 3},
        {"do": "shell", "name": "main", "command": 3, "timeout_s": 1},
        {"do": "shell", "name": "main", "command": "echo \0", "timeout_s": 1},
        {"do": "shell", "name": ["x"], "command": "", "timeout_s": 1},
        {"do": "read", "path": 3, "max_bytes": 3},
        {"do": "read", "path": "x"},
        {"do": "read", "path": "a\0b", "max_bytes": 3},
        {"do": "write"},
        {"do": "pack", "path": "."},
        {"do": "forward"},
        {"do": "forward", "port": 1 << 40},
        {"do": "resize", "of": 99, "rows": 1, "cols": 1},
        {"do": "no such call"},
        {"do": ["ping"]},
    ]
    for fields in wrong:
        number = sandbox.start(**fields)
        answer = sandbox.answer(number)
        assert answer["error"] in ("bad", "unsupported", "missing", "refused"), fields
    assert sandbox.call("ping")["end"] is True
    assert sandbox.exec("echo", "fine").out == b"fine\n"


def test_frames_for_finished_calls_are_ignored(sandbox: Client) -> None:
    for what in ({"more": True}, {"eof": True}, {"cancel": True}, {"ack": 5}):
        sandbox.send({"id": 77, **what}, b"x" if "more" in what else b"")
    assert sandbox.call("ping")["end"] is True


def test_closing_the_channel_ends_every_process(sandbox: Client, marker: str, sleepers: Callable[[], int]) -> None:
    sandbox.shell(f"(setsid sleep {marker} &); sleep {marker} &")
    sandbox.start("exec", argv=["sleep", marker], timeout_s=60)
    sandbox.call("ping")
    sandbox.line.close()
    assert sandbox.process is not None
    assert sandbox.process.wait(20) == 0
    assert sleepers() == 0


def test_the_agent_exits_with_the_exit_code_of_its_command(tmp_path: Path) -> None:
    command = ["sh", "-c", "echo $HOME; echo problem >&2; sleep 0.1; exit 7"]
    with started(tmp_path, command=command) as sandbox:
        assert sandbox.frame() == ({"ending": "exited"}, b"")
        assert sandbox.is_at_end()
        assert sandbox.process is not None
        assert sandbox.process.wait(20) == 7
        assert sandbox.process.stderr is not None
        assert sandbox.process.stderr.read() == b"problem\n"


@pytest.mark.parametrize(("command", "code"), [(["no-such"], 127), (["sh", "-c", "kill -9 $$"], 137)])
def test_a_command_that_does_not_start_or_is_killed_ends_the_agent(
    tmp_path: Path, command: list[str], code: int
) -> None:
    with started(tmp_path, command=command) as sandbox:
        assert sandbox.process is not None
        assert sandbox.process.wait(20) == code


def test_the_log_holds_the_end_of_the_commands_output(tmp_path: Path) -> None:
    script = "head -c 100000 /dev/zero | tr '\\0' x >&2; echo end >&2; touch done; sleep 600"
    with started(tmp_path, command=["sh", "-c", script]) as sandbox:
        sandbox.sh("while [ ! -e done ]; do sleep 0.01; done")
        assert sandbox.call("log").data == b"x" * ((64 << 10) - 4) + b"end\n"


def test_other_calls_do_not_end_background_processes_of_the_command(
    tmp_path: Path, marker: str, sleepers: Callable[[], int]
) -> None:
    script = f"(setsid sleep {marker} &); sleep {marker}"
    with started(tmp_path, command=["sh", "-c", script]) as sandbox:
        while sleepers() < 2:
            sandbox.call("ping")
        sandbox.sh("kill -9 $PPID; sleep 600")
        assert sleepers() == 2
    assert sleepers() == 0


def test_stats_count_processes(sandbox: Client) -> None:
    sandbox.shell("sleep 600 & sleep 600 &")
    found = sandbox.call("stats").end
    assert found["processes"] >= 5  # the agent, the shell's lane, bash, and the two
    assert 0 < found["uptime_s"] < 60


def test_sigterm_ends_the_agent_and_its_processes(sandbox: Client, marker: str, sleepers: Callable[[], int]) -> None:
    sandbox.shell(f"sleep {marker} &")
    assert sandbox.process is not None
    sandbox.process.send_signal(signal.SIGTERM)
    assert sandbox.process.wait(20) == 128 + signal.SIGTERM
    assert sleepers() == 0


def test_a_detached_agent_is_reached_again_through_its_socket(
    tmp_path: Path, marker: str, sleepers: Callable[[], int]
) -> None:
    door = tmp_path / "door"
    with started(tmp_path, detached=True, control_socket=str(door), ttl_s=60) as first:
        first.shell("x=1")
        first.start("exec", argv=["sleep", marker], timeout_s=60)
        assert first.call("ping")["end"] is True
        with socket.socket(socket.AF_UNIX) as line:
            line.connect(str(door))
            second = Client(line)
            assert second.hello == first.hello
            second.send({"config": config(tmp_path, env={})})
            number = second.start("exec", argv=["sleep", marker], timeout_s=60)
            while sleepers() < 2:
                second.call("ping")
            first.line.close()
            while sleepers() > 1:
                second.call("ping")
            assert second.shell("echo $x").out == b"1\n"
            second.send({"id": number, "cancel": True})
            assert second.answer(number)["end"] is True
        with socket.socket(socket.AF_UNIX) as line:
            line.connect(str(door))
            third = Client(line)
            assert third.shell("echo $x").out == b"1\n"
            assert first.process is not None
            first.process.terminate()
    assert wait_until_gone(first.pid)


def test_garbage_at_the_socket_ends_only_that_channel(tmp_path: Path) -> None:
    with started(tmp_path, control_socket=str(tmp_path / "door")) as sandbox:
        sandbox.call("ping")
        with socket.socket(socket.AF_UNIX) as line:
            line.connect(str(tmp_path / "door"))
            stranger = Client(line)
            line.sendall(GARBAGE["text"])
            assert stranger.is_at_end()
        assert sandbox.call("ping")["end"] is True
