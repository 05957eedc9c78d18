"""A vLLM server that is killed, hangs or does not start leaves no process behind, and says why."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import httpx
import pytest

from envkit import clock
from envkit.errors import UsageError
from envkit.trainer_bridge.engines.vllm.server import VllmServer
from envkit.wiring.launch.local import LocalLauncher
from envkit.wiring.launch.supervise import members

from . import fake_vllm

START_S = 30.0
ROOT = Path(__file__).parents[4]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="vLLM servers run on Linux")

# Starts a server, and waits.
OWNER = """
import sys
from pathlib import Path
import anyio
from envkit import clock
from envkit.trainer_bridge.engines.vllm.server import VllmServer
from envkit.wiring.launch.local import LocalLauncher
from tests.trainer_bridge.engines.vllm import fake_vllm

async def main():
    server = VllmServer(fake_vllm.settings(Path(sys.argv[1]), sys.argv[2]), launcher=LocalLauncher())
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(server.start, 60)
        await fake_vllm.until_signals_are_set(Path(sys.argv[1]), sys.argv[2])
        print(server.pid, flush=True)
        await anyio.sleep(600)

clock.run(main)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of logs, apart from those of other tests."""
    folder = tmp_path / "logs"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        with anyio.fail_after(START_S + 60):
            await test()

    clock.run(main)


def server_pid(group: int) -> int:
    """The server itself: the child of the supervisor, which leads the group."""
    (pid,) = Path(f"/proc/{group}/task/{group}/children").read_text().split()
    return int(pid)


def test_a_started_server_answers_and_leaves_nothing_when_it_is_stopped(tmp_path: Path, folder: Path) -> None:
    async def test() -> None:
        server = VllmServer(fake_vllm.settings(tmp_path), launcher=LocalLauncher())
        await server.start(START_S)
        async with httpx.AsyncClient() as client:
            assert (await client.get(f"{server.url}/health")).status_code == 200
        group = server.pid
        assert len(members(group)) == 3  # supervisor, server, and its child
        await server.stop()
        assert members(group) == []
        assert files(folder) == []
        assert await server.wait_ended() == "exited with code 0"

    run(test)


@pytest.mark.slow
def test_a_killed_server_ends_with_its_children_and_starts_again(tmp_path: Path, folder: Path) -> None:
    async def test() -> None:
        server = VllmServer(fake_vllm.settings(tmp_path), launcher=LocalLauncher())
        await server.start(START_S)
        group = server.pid
        os.kill(server_pid(group), signal.SIGKILL)
        with anyio.fail_after(5):  # although the child ignores SIGTERM
            assert await server.wait_ended() == "killed by signal 9"
        assert members(group) == []
        await server.start(START_S)
        assert len(members(server.pid)) == 3
        await server.stop()
        assert len(files(folder)) == 1  # the log of the server that was killed

    run(test)


@pytest.mark.slow
def test_a_killed_supervisor_leaves_nothing_though_the_server_ignores_sigterm(tmp_path: Path) -> None:
    async def test() -> None:
        server = VllmServer(fake_vllm.settings(tmp_path, "deaf"), launcher=LocalLauncher())
        await server.start(START_S)
        group = server.pid
        os.kill(group, signal.SIGKILL)
        assert await server.wait_ended() == "killed by signal 9"
        assert members(group) == []

    run(test)


@pytest.mark.slow
def test_a_killed_owner_leaves_no_process_behind_even_while_the_server_starts(tmp_path: Path) -> None:
    async def test() -> None:
        group = await owned_and_left(tmp_path, "never-ready")
        while members(group):  # noqa: ASYNC110 - the kernel sets no event
            await anyio.sleep(0.05)

    run(test)


@pytest.mark.parametrize(
    ("model", "why"),
    [
        ("too-large", "it ran out of memory; .*No available memory for the cache blocks"),
        ("unreadable", "OSError: /models/unreadable has no config.json; its log is"),
    ],
)
def test_the_error_of_a_server_that_does_not_start_contains_the_reason(model: str, why: str, tmp_path: Path) -> None:
    async def test() -> None:
        server = VllmServer(fake_vllm.settings(tmp_path, model), launcher=LocalLauncher())
        with pytest.raises(UsageError, match=f"the vLLM server did not start: {why}"):
            await server.start(START_S)
        assert server.log.exists()

    run(test)


def test_a_server_that_does_not_answer_in_time_is_ended(tmp_path: Path) -> None:
    async def test() -> None:
        server = VllmServer(fake_vllm.settings(tmp_path, "never-ready"), launcher=LocalLauncher())
        with pytest.raises(UsageError, match="did not answer within 1 s"):
            await server.start(1)
        assert members(server.pid) == []

    run(test)


def test_a_port_in_use_is_refused_before_the_server_starts(tmp_path: Path) -> None:
    async def test() -> None:
        async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener:
            port = listener.extra(anyio.abc.SocketAttribute.local_port)
            with pytest.raises(UsageError, match=f"cannot listen on port {port}"):
                await VllmServer(fake_vllm.settings(tmp_path), launcher=LocalLauncher(), port=port).start(START_S)

    run(test)


async def owned_and_left(tmp_path: Path, model: str) -> int:
    """Start a server in another process, kill that process, and return the server's group."""
    words = [sys.executable, "-c", OWNER, str(tmp_path), model]
    async with await anyio.open_process(words, cwd=ROOT) as owner:
        assert owner.stdout is not None
        group = int(await owner.stdout.receive())
        owner.kill()
        await owner.wait()
    return group


def files(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]
