"""The agent's channel, whatever comes by it, and the life of the agent itself."""

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
def box(tmp_path: Path) -> Iterator[Client]:
    with started(tmp_path) as client:
        yield client


def test_it_says_hello_and_answers(box: Client) -> None:
    assert (box.hello["hello"], box.hello["pid"]) == (3, box.pid)
    assert box.call("ping").end == {"id": 1, "end": True}


def test_frames_may_be_torn_anywhere(box: Client) -> None:
    frames = b"".join(encoded({"id": n, "do": "ping", "filling": "\u00e9" * n}) for n in range(1, 40))
    chance = random.Random(7)
    while frames:
        size = chance.choice((1, 2, 3, 7, 50))
        box.line.sendall(frames[:size])
        frames = frames[size:]
    assert [box.frame()[0]["id"] for _ in range(39)] == list(range(1, 40))


GARBAGE = {
    "long header": struct.pack(">II", (1 << 20) + 1, 0),
    "long body": struct.pack(">II", 2, (1 << 16) + 1) + b"{}",
    "not json": struct.pack(">II", 4, 0) + b"nope",
    "not utf-8": struct.pack(">II", 4, 0) + b'"\xff\xfe"',
    "no object": encoded([]),  # type: ignore[arg-type]
    "no number": encoded({"do": "ping"}),
    "a number that is none": encoded({"id": "x", "do": "ping"}),
    "deeply nested": struct.pack(">II", 200_000, 0) + b"[" * 200_000,
    "text": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
}


@pytest.mark.parametrize("name", GARBAGE)
def test_what_is_no_frame_ends_the_agent(box: Client, name: str, marker: str, sleepers: Callable[[], int]) -> None:
    box.start("exec", argv=["sleep", marker], timeout_s=60)
    box.line.sendall(GARBAGE[name])
    assert box.is_at_end()
    assert box.process is not None
    assert box.process.wait(20) == 3
    assert box.process.stderr is not None
    assert b"broken frame" in box.process.stderr.read()
    assert sleepers() == 0


def test_calls_of_the_wrong_form_are_bad_and_nothing_more(box: Client) -> None:
    wrong: list[dict[str, Any]] = [
        {"do": "exec"},
        {"do": "exec", "argv": "ls", "timeout_s": 1},
        {"do": "exec", "argv": [1], "timeout_s": 1},
        {"do": "exec", "argv": ["ls"], "timeout_s": "x"},
        {"do": "exec", "argv": ["ls"], "timeout_s": 1, "env": {"A=B": "c"}},
        {"do": "exec", "argv": ["ls"], "timeout_s": 1, "env": ["A"]},
        {"do": "exec", "argv": ["ls"], "timeout_s": 1, "pty": 3},
        {"do": "shell", "name": "main", "command": 3, "timeout_s": 1},
        {"do": "shell", "name": ["x"], "command": "", "timeout_s": 1},
        {"do": "read", "path": 3, "max_bytes": 3},
        {"do": "read", "path": "x"},
        {"do": "write"},
        {"do": "pack", "path": "."},
        {"do": "forward"},
        {"do": "forward", "port": 1 << 40},
        {"do": "resize", "of": 99, "rows": 1, "cols": 1},
        {"do": "no such call"},
        {"do": ["ping"]},
    ]
    for fields in wrong:
        number = box.start(**fields)
        answer = box.answer(number)
        assert answer["error"] in ("bad", "unsupported", "missing", "refused"), fields
    assert box.call("ping")["end"] is True
    assert box.exec("echo", "fine").out == b"fine\n"


def test_frames_for_calls_that_are_over_are_ignored(box: Client) -> None:
    for what in ({"more": True}, {"eof": True}, {"cancel": True}, {"ack": 5}):
        box.send({"id": 77, **what}, b"x" if "more" in what else b"")
    assert box.call("ping")["end"] is True


def test_the_channels_end_ends_everything(box: Client, marker: str, sleepers: Callable[[], int]) -> None:
    box.shell(f"(setsid sleep {marker} &); sleep {marker} &")
    box.start("exec", argv=["sleep", marker], timeout_s=60)
    box.call("ping")
    box.line.close()
    assert box.process is not None
    assert box.process.wait(20) == 0
    assert sleepers() == 0


def test_the_commands_end_is_the_boxs(tmp_path: Path) -> None:
    command = ["sh", "-c", "echo $HOME; echo problem >&2; sleep 0.1; exit 7"]
    with started(tmp_path, command=command) as box:
        assert box.frame() == ({"ending": "exited"}, b"")
        assert box.is_at_end()
        assert box.process is not None
        assert box.process.wait(20) == 7
        assert box.process.stderr is not None
        assert box.process.stderr.read() == b"problem\n"


@pytest.mark.parametrize(("command", "code"), [(["no-such"], 127), (["sh", "-c", "kill -9 $$"], 137)])
def test_a_command_that_does_not_start_or_is_killed_ends_the_box(tmp_path: Path, command: list[str], code: int) -> None:
    with started(tmp_path, command=command) as box:
        assert box.process is not None
        assert box.process.wait(20) == code


def test_the_log_is_the_end_of_what_the_command_wrote(tmp_path: Path) -> None:
    script = "head -c 100000 /dev/zero | tr '\\0' x >&2; echo end >&2; touch done; sleep 600"
    with started(tmp_path, command=["sh", "-c", script]) as box:
        box.sh("while [ ! -e done ]; do sleep 0.01; done")
        assert box.call("log").data == b"x" * ((64 << 10) - 4) + b"end\n"


def test_others_do_not_end_what_the_command_left_to_itself(
    tmp_path: Path, marker: str, sleepers: Callable[[], int]
) -> None:
    script = f"(setsid sleep {marker} &); sleep {marker}"
    with started(tmp_path, command=["sh", "-c", script]) as box:
        while sleepers() < 2:
            box.call("ping")
        box.sh("kill -9 $PPID; sleep 600")
        assert sleepers() == 2
    assert sleepers() == 0


def test_stats_count_processes(box: Client) -> None:
    box.shell("sleep 600 & sleep 600 &")
    found = box.call("stats").end
    assert found["processes"] >= 5  # the agent, the shell's lane, bash, and the two
    assert 0 < found["uptime_s"] < 60


def test_its_time_to_live_ends_it(tmp_path: Path, marker: str, sleepers: Callable[[], int]) -> None:
    with started(tmp_path, ttl_s=2, detached=True) as box:
        box.start("exec", argv=["sleep", marker], timeout_s=60)
        assert box.frame() == ({"ending": "expired"}, b"")
        assert box.is_at_end()
        assert sleepers() == 0


def test_the_request_to_end_is_heard(box: Client, marker: str, sleepers: Callable[[], int]) -> None:
    box.shell(f"sleep {marker} &")
    assert box.process is not None
    box.process.send_signal(signal.SIGTERM)
    assert box.process.wait(20) == 128 + signal.SIGTERM
    assert sleepers() == 0


def test_one_that_stays_is_reached_again_by_its_door(tmp_path: Path, marker: str, sleepers: Callable[[], int]) -> None:
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


def test_garbage_at_the_door_ends_that_channel_alone(tmp_path: Path) -> None:
    with started(tmp_path, control_socket=str(tmp_path / "door")) as box:
        box.call("ping")
        with socket.socket(socket.AF_UNIX) as line:
            line.connect(str(tmp_path / "door"))
            stranger = Client(line)
            line.sendall(GARBAGE["text"])
            assert stranger.is_at_end()
        assert box.call("ping")["end"] is True
