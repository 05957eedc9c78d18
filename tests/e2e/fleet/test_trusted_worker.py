"""A real gateway plays an environment that uses sandboxes as tools, in its trusted worker."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest
from anyio.abc import SocketStream

import envkit
from envkit import clock
from envkit.errors import EnvkitError, SandboxLostError
from envkit.http.client.env_client import EnvClient
from envkit.http.client.sandbox_client import SandboxClient
from envkit.protocols import Episode
from envkit.types import Task
from tests.contract.kinds import arguments, processes
from tests.e2e.fleet.fleet import Gateway, free_port, install_environment, run, serving

pytestmark = [
    pytest.mark.bwrap,
    pytest.mark.xdist_group("trusted-worker"),  # one server for all tests
    pytest.mark.skipif(os.geteuid() != 0, reason="only root's sandboxes are found by their first process"),
]

TOOLED, JUDGED = "Tooled-v0", "Judged-v0"
TOOLED_ENV = """
from contextlib import AsyncExitStack
from pathlib import Path
from envkit.env import AsyncEnv
from envkit.registry import register
from envkit.types import Observation, Reset, SandboxSpec, Step

SHELL = {"type": "function", "function": {"name": "shell", "description": "Runs a command.", "parameters": {}}}

class Tooled(AsyncEnv):
    def __init__(self, sandboxes):
        self._sandboxes = sandboxes
        self._lease = AsyncExitStack()

    async def reset(self, *, seed, options):
        self._sandbox = await self._lease.enter_async_context(self._sandboxes.lease(SandboxSpec()))
        await self._sandbox.upload(Path(__file__), "task/source.py")
        await self._sandbox.write("task/number", str(seed).encode())
        return Reset(Observation(self._sandbox.id), {}, "Solve it.", (SHELL,), is_graded=True)

    async def step(self, action):
        done = await self._sandbox.exec(["/bin/sh", "-c", action], timeout_s=60)
        return Step(Observation(done.stdout, role="tool"), 0.25, action.endswith("# submit"), False, {})

    async def grade(self):
        return float((await self._sandbox.exec(["cat", "answer"])).stdout.strip() == "right")

    async def close(self):
        await self._lease.aclose()

class Judged(AsyncEnv):
    def __init__(self, judge):
        self._judge = judge

    async def reset(self, *, seed, options):
        return Reset(Observation("Say something kind."), {}, is_graded=True)

    async def step(self, action):
        self._said = action
        return Step(Observation(""), 0.0, True, False, {})

    async def grade(self):
        return float(await self._judge.ask([{"role": "user", "content": self._said}]) == "kind")

    async def close(self):
        pass

def register_all():
    register("Tooled-v0", "tooled_env:Tooled", needs={"sandbox"}, replayable=False)
    register("Judged-v0", "tooled_env:Judged", needs={"judge"})
"""
JUDGE_PORT = free_port()
EPISODES = 50


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("gateway")
    install_environment(folder / "site", "tooled_env", TOOLED_ENV)
    judge = f"envs.judge=small@http://127.0.0.1:{JUDGE_PORT}"
    settings = ("envs.sandboxes=1", "envs.warm=0", "envs.tool_episodes=4", judge)
    with serving("local", folder, *settings, environments=folder / "site") as gateway:
        yield gateway


async def tools_of(gateway: Gateway) -> dict[str, str]:
    """Return the backend ids of the sandboxes of the environments, by the ids that the environments see."""
    return {id.rpartition("-trusted-")[2]: found for id, found in (await gateway.user_sandboxes()).items()}


async def without_tools(gateway: Gateway) -> None:
    """Wait until the pool lends no sandbox."""
    with anyio.fail_after(20):
        while await tools_of(gateway):  # noqa: ASYNC110
            await anyio.sleep(0.05)


async def grade(episode: Episode) -> float | None:
    return await episode.grade()


def trusted_worker(gateway: Gateway) -> int:
    """Return the process of the trusted worker."""
    (found,) = (pid for pid in processes() if b"--sandboxes" in arguments(pid) and gateway.name in str(arguments(pid)))
    return found


def test_an_episode_runs_commands_in_its_sandbox_and_is_graded(gateway: Gateway) -> None:
    with envkit.make(TOOLED, url=gateway.url) as env:
        _, info = env.reset(seed=7)
        assert (info["system"], info["tools"][0]["function"]["name"]) == ("Solve it.", "shell")
        assert env.step("cat task/number; wc -l < task/source.py")[:2] == (f"7{TOOLED_ENV.count(chr(10))}\n", 0.25)
        *_, terminated, _, info = last = env.step("echo right > answer # submit")
        assert (last[1], terminated, info["grade"], info["success"]) == (1.25, True, 1.0, 1.0)
        env.reset(seed=8)
        last = env.step("echo wrong > answer # submit")
        assert (last[1], last[4]["grade"], last[4]["success"]) == (0.25, 0.0, 0.0)
    run(lambda: without_tools(gateway), 30)


def test_a_lost_tool_sandbox_ends_exactly_its_episode_and_fifty_episodes_leave_no_sandbox(gateway: Gateway) -> None:
    async def main() -> None:
        lost: list[tuple[int, str]] = []
        graded: list[int] = []

        async def play(client: EnvClient, seed: int) -> None:
            async with client.lease(Task(TOOLED, seed)) as episode:
                name = (await episode.reset()).observation.text
                if seed == 13:
                    os.kill(gateway.first_pid((await tools_of(gateway))[name]), signal.SIGKILL)
                try:
                    await episode.step("echo right > answer")
                except SandboxLostError as error:
                    lost.append((seed, str(error.cause)))
                else:
                    assert await grade(episode) == 1.0
                    graded.append(seed)

        async with EnvClient(gateway.url) as client, anyio.create_task_group() as tasks:
            for seed in range(EPISODES):
                tasks.start_soon(play, client, seed)
        assert (lost, len(graded)) == ([(13, "killed by signal 9 (SIGKILL)")], EPISODES - 1)
        await without_tools(gateway)

    run(main, 120)


def test_the_sandboxes_of_a_killed_worker_are_stopped_and_the_next_worker_plays(gateway: Gateway) -> None:
    async def main() -> None:
        async with EnvClient(gateway.url) as client:
            async with client.lease(Task(TOOLED, 0)) as episode:
                await episode.reset()
                os.kill(trusted_worker(gateway), signal.SIGKILL)
                began = clock.now()
                with pytest.raises(SandboxLostError, match="killed by signal 9"):
                    await grade(episode)
                await without_tools(gateway)
                assert clock.now() - began < 20
            async with client.lease(Task(TOOLED, 0)) as episode:
                await episode.reset()
                assert (await episode.step("echo right > answer; echo ok")).observation.text == "ok\n"
                assert await grade(episode) == 1.0

    run(main, 60)


def test_sandboxes_of_untrusted_environments_and_of_clients_do_not_see_the_pool(gateway: Gateway) -> None:
    """The socket exists on the machine, but neither in a client's sandbox nor in that of an environment."""

    async def main() -> None:
        async with EnvClient(gateway.url) as player, player.lease(Task(TOOLED, 0)) as episode:
            await episode.reset()  # the worker starts with its first episode
        words = [one.decode() for one in arguments(trusted_worker(gateway))]
        (socket,) = (word.removeprefix("unix:") for word in words if word.startswith("unix:"))
        assert Path(socket).parent.stat().st_mode & 0o777 == 0o700
        (backend_id,) = (await gateway.env_sandboxes()).values()
        inside = Path("/proc", str(gateway.env_server(backend_id)), "root")
        assert (inside / "usr").exists()
        assert not (inside / socket.lstrip("/")).exists()
        async with SandboxClient(gateway.url) as client, client.lease(gateway.spec()) as sandbox:
            assert (await sandbox.exec(["ls", socket])).exit_code != 0

    run(main, 60)


async def judge_as_kind(stream: SocketStream) -> None:
    """Answer one request of a chat completion."""
    async with stream:
        request = b""
        while not request.endswith(b"}"):
            request += await stream.receive()
        content = json.dumps({"choices": [{"message": {"role": "assistant", "content": "kind"}}]}).encode()
        await stream.send(
            b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(content) + content
        )


def test_an_environment_that_needs_a_judge_gets_that_of_the_configuration(gateway: Gateway) -> None:
    async def main() -> None:
        listener = await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=JUDGE_PORT)
        async with listener, clock.background_tasks() as tasks, EnvClient(gateway.url) as client:
            tasks.start_soon(listener.serve, judge_as_kind)
            async with client.lease(Task(JUDGED, 0)) as episode:
                await episode.reset()
                await episode.step("You look well.")
                assert await grade(episode) == 1.0

    run(main, 60)


def test_a_server_without_sandboxes_refuses_an_environment_that_needs_them(tmp_path: Path) -> None:
    install_environment(tmp_path / "site", "tooled_env", TOOLED_ENV)

    async def main(gateway: Gateway) -> None:
        async with EnvClient(gateway.url) as client:
            with pytest.raises(EnvkitError, match=r"needs sandboxes, .*\(backend: none\); start it with another"):
                async with client.lease(Task(TOOLED, 0)):
                    pass

    with serving("none", tmp_path, environments=tmp_path / "site") as gateway:
        run(lambda: main(gateway), 60)
