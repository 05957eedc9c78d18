"""Servers as processes: start, refusal to start, shutdown, and crash."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

import envkit
from envkit import clock
from envkit.errors import EnvkitError, UnreachableError, UsageError
from envkit.http.api.app import create_app
from envkit.http.client.env_client import EnvClient
from envkit.http.server.server import serve
from envkit.types import Task
from tests.http.envs import listening, serving, slots
from tests.http.pools import pool_of
from tests.http.remote_sandboxes import scripted

ENV_SERVER = [sys.executable, "-W", "error", "-m", "envkit.wiring.env_server"]
TIMEOUT_S = 120
LAKE = Task("FrozenLake-v0", 3, {"size": 4})


@contextmanager
def env_server(path: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    words, pipe = [*ENV_SERVER, "--socket", str(path), *arguments], subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as running:
        try:
            clock.run(wait_until_connectable, path, running)
            yield running
        finally:
            running.kill()


async def wait_until_connectable(path: Path, running: subprocess.Popen[str]) -> None:
    with anyio.fail_after(TIMEOUT_S):
        while running.poll() is None:
            try:
                async with await anyio.connect_unix(str(path)):
                    return
            except OSError:
                await anyio.sleep(0.02)
    raise AssertionError(running.communicate())


async def play(address: str) -> tuple[int, str]:
    async with EnvClient(address) as client, client.lease(LAKE) as episode:
        return client.capacity, (await episode.reset()).observation.text


def test_requests_of_connections_above_the_limit_get_status_503() -> None:
    async def run() -> None:
        async with slots() as host, listening(create_app(host), max_connections=4) as address:

            async def status() -> int:
                async with httpx.AsyncClient(base_url=address, trust_env=False) as client:
                    return (await client.get("/v1/health")).status_code

            port = int(address.rpartition(":")[2])
            idle = [await anyio.connect_tcp("127.0.0.1", port) for _ in range(4)]
            assert await status() == 503
            for connection in idle:
                await connection.aclose()
            with anyio.fail_after(10):
                while await status() != 200:  # noqa: ASYNC110 - nobody tells when the server has noticed
                    await anyio.sleep(0.02)

    clock.run(run)


def test_a_signal_lets_the_running_step_finish_and_refuses_new_ones() -> None:
    async def run() -> None:
        lender = slots()
        async with (
            lender,
            listening(create_app(lender), drain_s=30, handle_signals=True) as address,
            anyio.create_task_group() as tasks,
            EnvClient(address) as client,
            client.lease(Task("Sleeper-v0", 0)) as episode,
        ):
            await episode.reset()

            async def interrupt() -> None:
                await anyio.sleep(0.1)
                signal.raise_signal(signal.SIGTERM)
                await anyio.sleep(0.1)
                with pytest.raises(UnreachableError, match="the server is shutting down"):
                    async with client.lease(Task("Sleeper-v0", 1)):
                        pass

            tasks.start_soon(interrupt)
            assert (await episode.step("sleep 0.5")).observation.text == "1 slept"

    clock.run(run)


async def call_during_shutdown(seconds: float, drain_s: float) -> tuple[httpx.Response, float]:
    """Return the answer to a call of `seconds` during which the server shuts down, and the duration of that."""
    answers: list[httpx.Response] = []
    async with scripted() as backend, slots() as host, pool_of(backend) as pool, anyio.create_task_group() as tasks:
        stop = serving(host, pool=pool, drain_s=drain_s)
        address = await stop.__aenter__()
        async with httpx.AsyncClient(base_url=address, trust_env=False, timeout=30) as client:
            await client.put("/v1/sandboxes/a", json={})

            async def ask() -> None:
                body = {"argv": ["sleep", str(seconds)], "timeout_s": 60}
                answers.append(await client.post("/v1/sandboxes/a/exec", json=body))

            tasks.start_soon(ask)
            await anyio.sleep(0.3)
            began = clock.now()
            await stop.__aexit__(None, None, None)
    return answers[0], clock.now() - began


def test_a_call_that_outlasts_the_drain_timeout_is_answered_with_503(caplog: pytest.LogCaptureFixture) -> None:
    answer, took_s = clock.run(call_during_shutdown, 40, 0.2)
    assert (answer.status_code, answer.headers["content-type"]) == (503, "application/problem+json")
    assert (answer.json()["type"], answer.json()["retry"], took_s < 15) == ("unreachable", True, True)
    assert caplog.messages == []


def test_a_server_that_is_killed_is_reported_at_once_and_nothing_hangs(tmp_path: Path) -> None:
    async def main(running: subprocess.Popen[str], address: str) -> float:
        async with EnvClient(address) as client:
            outcomes: list[str] = []

            async def episode(number: int) -> None:
                try:
                    async with client.lease(Task("FrozenLake-v0", number)) as episode:
                        await episode.reset()
                        while True:
                            await episode.step("<answer>up</answer>")
                            await anyio.sleep(0.01)
                except EnvkitError as error:
                    outcomes.append(str(error))

            async with anyio.create_task_group() as tasks:
                for number in range(20):
                    tasks.start_soon(episode, number)
                await anyio.sleep(0.03)
                running.kill()
                began = clock.now()
            assert len(outcomes) == 20
            with pytest.raises(UnreachableError, match=f"{address} does not answer: "):
                await client.health()
            return clock.now() - began

    path = tmp_path / "socket"
    with env_server(path, "--capacity", "64") as running:
        assert clock.run(main, running, f"unix:{path}") < 10


@pytest.mark.parametrize(
    ("host", "port", "message"),
    [
        ("127.0.0.1", 70_000, "invalid port 70000; use 0 to 65535"),
        ("nowhere.invalid", 0, r"port 0 on nowhere\.invalid cannot be used: [^\n]+"),
        ("a" * 300, 0, f"'{'a' * 80}' is not a host name"),
    ],
)
def test_an_unusable_address_is_refused_in_one_line(host: str, port: int, message: str) -> None:
    async def run() -> None:
        async with slots() as envs:
            with anyio.fail_after(TIMEOUT_S):
                await serve(create_app(envs), host=host, port=port)

    with pytest.raises(UsageError, match=f"^{message}$"):
        clock.run(run)


def test_a_server_listens_on_ipv6() -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")

    async def run() -> str:
        addresses: list[str] = []

        def on_ready(address: str) -> None:
            addresses.append(address)
            tasks.cancel_scope.cancel()

        async with slots() as host, anyio.create_task_group() as tasks:
            tasks.start_soon(partial(serve, create_app(host), host="::1", port=0, on_ready=on_ready))
        return addresses[0]

    assert clock.run(run).startswith("http://[::1]:")


def test_a_stale_unix_socket_is_replaced_and_removed_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(path))

    async def run() -> None:
        async with slots() as host, serving(host, uds=str(path)) as address, EnvClient(address) as client:
            assert address == f"unix:{path}"
            assert client.capacity == 4

    clock.run(run)
    assert not path.exists()


def test_the_socket_of_a_running_server_and_other_files_are_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    file = tmp_path / "file"
    file.write_text("precious")

    async def run() -> None:
        async with slots() as host, serving(host, uds=str(path)) as address, EnvClient(address) as client:
            for taken, message in (
                (path, f"a server already listens at {path}; stop it or choose another path"),
                (file, f"{file} exists and is not a socket; choose another path"),
                (tmp_path / "no" / "folder", "cannot create a socket at .*: No such file or directory"),
                (tmp_path / ("x" * 120), "cannot create a socket at .*: .*too long"),
            ):
                with pytest.raises(UsageError, match=message):
                    await serve(create_app(host), uds=str(taken))
            assert (await client.health()).status == "alive"

    clock.run(run)
    assert file.read_text() == "precious"


def test_the_env_server_keeps_running_without_a_standard_input(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    arguments = [*ENV_SERVER, "--socket", str(path)]
    with subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as running:
        clock.run(wait_until_connectable, path, running)
        assert clock.run(play, f"unix:{path}")[0] == 1
        running.terminate()
        assert running.wait(TIMEOUT_S) == 0


def test_the_heartbeat_of_the_env_server_stops_with_its_process(tmp_path: Path) -> None:
    def heartbeat() -> bytes:
        with socket.socket(socket.AF_UNIX) as stream:
            stream.settimeout(1)
            stream.connect(str(tmp_path / "env.heartbeat"))
            return stream.recv(1)

    path = tmp_path / "env.sock"
    with env_server(path) as running:
        clock.run(play, f"unix:{path}")
        assert [heartbeat(), heartbeat()] == [b"1", b"1"]
        running.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, running.pid, os.WSTOPPED)
        with pytest.raises(TimeoutError):
            heartbeat()
        running.send_signal(signal.SIGCONT)


def test_the_env_server_imports_no_heavy_packages() -> None:
    heavy = "fastapi pydantic prometheus_client httpx torch uvloop"
    program = (
        f"import sys, envkit.wiring.env_server; print([name for name in '{heavy}'.split() if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_make_with_an_address_plays_the_same_as_without_and_the_server_ends_with_its_standard_input(
    tmp_path: Path,
) -> None:
    path = tmp_path / "socket"
    moves = [f"<answer>{move}</answer>" for move in ("up", "left", "nonsense", "down", "right", "up")]
    with env_server(path, "--capacity", "3") as running:
        assert clock.run(play, f"unix:{path}")[0] == 3
        played = []
        ways: tuple[dict[str, Any], ...] = ({}, {"url": f"unix:{path}"})
        for options in ways:
            with envkit.make("FrozenLake-v0", slip=0.4, **options) as env:
                start, info = env.reset(seed=11, options={"size": 5})
                steps = []
                for move in moves:
                    steps.append(env.step(move))
                    if steps[-1][2] or steps[-1][3]:
                        break
                played.append((start, info["level"], [step[:4] for step in steps]))
        assert played[0] == played[1]
        assert len(played[0][2]) >= 1
        out, err = running.communicate(timeout=TIMEOUT_S)  # closes its standard input
    assert (running.returncode, out, err) == (0, "", "")
    assert not path.exists()
