"""Sessions of a real server survive it in their sandboxes, and the next server resumes them."""

from __future__ import annotations

import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

import envkit
from envkit.types import JSON
from tests.programs.program import SCRIPT, Program

pytestmark = [pytest.mark.bwrap, pytest.mark.detached]  # only detached sandboxes outlive their server

TASK: dict[str, Any] = {"env_id": "Sokoban-v0", "seed": 11, "options": {"size": 6, "boxes": 1, "max_moves": 30}}
MOVES = ["up", "left", "down", "down", "right", "up", "left", "left"]


@contextmanager
def server(port: int, state: Path, *more: str) -> Iterator[subprocess.Popen[str]]:
    """A server with one sandbox for environments."""
    words = [SCRIPT, "serve", "--backend", "local", "--port", str(port), "--state", str(state)]
    settings = ["--set", "envs.sandboxes=1", "--set", "envs.warm=0", "--set", "access_log=null"]
    settings += [word for setting in more for word in ("--set", setting)]
    with Program([*words, *settings], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("ready ")
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=30)


@pytest.fixture
def port() -> int:
    """A free port: the next server must have the same address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        number: int = listener.getsockname()[1]
        return number


def answers(moves: list[str]) -> list[str]:
    """Return the observations of an undisturbed episode."""
    env = envkit.make(TASK["env_id"], **TASK["options"])
    env.reset(seed=11)
    observations = [env.step(f"<answer>{move}</answer>")[0] for move in moves]
    env.close()
    return observations


def call(client: httpx.Client, verb: str, path: str, body: JSON = None) -> tuple[int, Any]:
    response = client.request(verb, path, json=body)
    return response.status_code, response.json()


def step(client: httpx.Client, turn: int, move: str, session: str = "a") -> tuple[int, Any]:
    return call(client, "POST", f"/v1/sessions/{session}/step", {"turn": turn, "action": f"<answer>{move}</answer>"})


def test_a_session_continues_after_the_server_was_killed(port: int, tmp_path: Path) -> None:
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
        with server(port, tmp_path) as process:
            started = call(client, "PUT", "/v1/sessions/a", TASK)
            assert started[0] == 200
            assert call(client, "PUT", "/v1/sessions/gone", TASK)[0] == 200
            assert call(client, "DELETE", "/v1/sessions/gone")[0] == 200
            before = [step(client, turn, move) for turn, move in enumerate(MOVES[:4])]
            process.kill()
        with server(port, tmp_path):
            again = step(client, 3, MOVES[3])  # its answer may have been lost
            other = step(client, 3, "up")
            after = [step(client, turn, move) for turn, move in enumerate(MOVES) if turn >= 4]
            assert call(client, "PUT", "/v1/sessions/a", TASK) == (200, {**started[1], "turn": 8})
            assert step(client, 0, MOVES[0], "gone")[0] == 404
            assert call(client, "DELETE", "/v1/sessions/a")[0] == 200
            assert step(client, 8, "up")[0] == 404
    assert [status for status, _ in (*before, *after)] == [200] * 8
    assert [reply["observation"] for _, reply in (*before, *after)] == answers(MOVES)
    assert again == before[3]
    assert (other[0], other[1]["type"]) == (409, "session_conflict")
