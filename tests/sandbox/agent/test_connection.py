"""The agent's channel: frames, malformed input, and how the agent ends."""

from __future__ import annotations

import random
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.sandbox.agent.agent_process import Client, encoded, started


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
    "not json": struct.pack(">II", 4, 0) + b"nope",
    "no id": encoded({"do": "ping"}),
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


def test_garbage_at_the_socket_ends_only_that_channel(tmp_path: Path) -> None:
    with started(tmp_path, control_socket=str(tmp_path / "door")) as sandbox:
        sandbox.call("ping")
        with socket.socket(socket.AF_UNIX) as line:
            line.connect(str(tmp_path / "door"))
            stranger = Client(line)
            line.sendall(GARBAGE["text"])
            assert stranger.is_at_end()
        assert sandbox.call("ping")["end"] is True
