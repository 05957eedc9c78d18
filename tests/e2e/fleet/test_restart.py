"""A real gateway that is killed or stopped: what survives, what is reported, what is left."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

import anyio
import httpx
import pytest

from envkit.errors import EnvkitError, UnreachableError
from envkit.http.client.env_client import EnvClient
from envkit.http.client.sandbox_client import SandboxClient
from envkit.types import Task
from tests.contract.kinds import new_marker, sleepers, until
from tests.e2e.fleet.fleet import DOCKER, LOCAL, NOTHING, Gateway, free_port, run, serving
from tests.e2e.fleet.test_nodes import MOVES, TASK, local_episode

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root's sandboxes outlive a server"),
]

TAKEN_BACK = "re-attached after a restart"


async def step(gateway: Gateway, turn: int) -> str:
    """Play a move of the session of the test; return the observation."""
    async with httpx.AsyncClient(base_url=gateway.url, timeout=20, verify=False) as client:
        if turn == 0:
            put = {"env_id": TASK.env_id, "seed": TASK.seed, "options": dict(TASK.options)}
            (await client.put("/v1/sessions/game", json=put)).raise_for_status()
        body = {"turn": turn, "action": f"<answer>{MOVES[turn]}</answer>"}
        return str((await client.post("/v1/sessions/game/step", json=body)).json()["observation"])


def first_pids(gateway: Gateway, sandbox_ids: dict[str, str]) -> dict[str, int]:
    return {id: gateway.first_pid(sandbox_id) for id, sandbox_id in sandbox_ids.items()}


@pytest.mark.parametrize("kind", [LOCAL, DOCKER])
def test_named_sandboxes_and_sessions_survive_a_killed_server(kind: str, tmp_path: Path) -> None:
    port = free_port()
    marker, seen = new_marker(), list[str]()

    async def leave(gateway: Gateway) -> tuple[dict[str, str], dict[str, str], dict[str, int]]:
        await gateway.wait_for_warm(1)
        async with SandboxClient(gateway.url) as client:
            await client.create("a", gateway.spec(memory_mib=128), ttl_s=600)
            await client.create("b", gateway.spec("sleep", marker))
            sandbox = client.get("a")
            await sandbox.write("kept", b"there")
            await sandbox.shell("work").run(f"cd /tmp; word=kept; sleep {marker} &", timeout_s=10)
        seen.extend([await step(gateway, turn) for turn in range(2)])
        await until(lambda: len(sleepers(marker)) == 2)
        held = await gateway.user_sandboxes()
        serves = await gateway.env_sandboxes()
        pids = first_pids(gateway, held | serves)
        gateway.process.kill()
        await gateway.exit_code()
        assert len(sleepers(marker)) == 2
        return held, serves, pids

    async def come_back(gateway: Gateway, held: dict[str, str], serves: dict[str, str], pids: dict[str, int]) -> None:
        assert await gateway.user_sandboxes() == held
        assert await gateway.env_sandboxes() == serves
        assert first_pids(gateway, held | serves) == pids
        seen.extend([await step(gateway, turn) for turn in range(1, len(MOVES))])  # the first answer may have been lost
        assert seen == [*local_episode()[:2], *local_episode()[1:]]
        assert len(sleepers(marker)) == 2
        for id in held:
            assert await gateway.last_phase(id) == ("leased", TAKEN_BACK)
        async with SandboxClient(gateway.url) as client:
            assert (await client.view("a")).expires_at_s is not None
            sandbox = client.get("a")
            assert await sandbox.read("kept") == b"there"
            result = await sandbox.shell("work").run("pwd; echo $word; jobs -p | wc -l", timeout_s=10)
            assert result.stdout.split() == ["/tmp", "kept", "1"]
        # The warm sandbox was not leased, and this server keeps none.
        assert await gateway.warm_sandboxes() == {}
        assert (await gateway.metrics())["envkit_sandbox_starts_total"] == 0

    with serving(kind, tmp_path, "envs.sandboxes=1", "envs.warm=1", port=port) as first:
        known: list[tuple[dict[str, str], dict[str, str], dict[str, int]]] = []

        async def before() -> None:
            known.append(await leave(first))

        run(before, 40)
        with serving(kind, tmp_path, "envs.sandboxes=1", "envs.warm=0", port=port) as second:
            run(lambda: come_back(second, *known[0]), 40)
            assert second.process.poll() is None
        assert second.process.returncode == 0
        assert second.left() == NOTHING
        assert first.left() == NOTHING
    assert sleepers(marker) == []


async def until_not_ready(client: EnvClient) -> None:
    while (ready := await client.ready()).ready:  # noqa: ASYNC110
        await anyio.sleep(0.02)
    assert ready.why == "the server is shutting down"


@pytest.mark.bwrap
def test_a_planned_restart_finishes_episodes_and_leaves_sandboxes_to_the_next_server(tmp_path: Path) -> None:
    settings, port = ("envs.sandboxes=1", "envs.warm=0", "drain_s=20"), free_port()

    async def main(first: Gateway) -> None:
        async with SandboxClient(first.url) as client, EnvClient(first.url) as player:
            await client.create("a", first.spec())
            await client.get("a").write("kept", b"there")
            held = await first.user_sandboxes() | await first.env_sandboxes()
            async with player.lease(Task("Sokoban-v0", 1)) as episode:
                await episode.reset()
                first.process.terminate()
                await until_not_ready(player)
                for refused in (player.lease(Task("Sokoban-v0", 2)).__aenter__(), client.create("b", first.spec())):
                    with pytest.raises(UnreachableError, match="shutting down and starts no"):
                        await refused
                assert await client.get("a").read("kept") == b"there"
                await episode.step("<answer>down</answer>")
                assert first.process.poll() is None
            assert await first.exit_code() == 0, first.log.read_text()
            with serving("local", tmp_path, *settings, port=port) as second:
                assert await client.get("a").read("kept") == b"there"
                assert await second.user_sandboxes() | await second.env_sandboxes() == held
                await client.stop("a")
                # A sandbox that is not taken over by a next server does not keep this one from ending.
                async with player.lease(Task("Sokoban-v0", 3)) as episode:
                    await episode.reset()
                    second.process.terminate()
                    await until_not_ready(player)
                    second.process.terminate()  # the second signal ends the wait
                    assert await second.exit_code() == 0, second.log.read_text()
                    with serving("local", tmp_path, "envs.sandboxes=1", "envs.warm=0", port=port) as third:
                        await episode.step("<answer>down</answer>")
                assert third.left() == NOTHING
        assert first.left() == NOTHING

    with serving("local", tmp_path, *settings, port=port) as first:
        run(lambda: main(first), 90)


async def _play(url: str, seed: int, answers: list[str]) -> None:
    """Play until the server shuts down."""
    with suppress(EnvkitError):
        async with EnvClient(url) as client:
            while True:
                async with client.lease(Task("FrozenLake-v0", seed)) as episode:
                    await episode.reset()
                    for _ in range(5):
                        answers.append((await episode.step("<answer>up</answer>")).observation.text)


async def _work(gateway: Gateway, number: int, answers: list[str]) -> None:
    """Run commands until the server shuts down."""
    with suppress(EnvkitError):
        async with SandboxClient(gateway.url) as client:
            await client.create(f"worker-{number}", gateway.spec())
            while True:
                done = await client.get(f"worker-{number}").exec(["echo", "hello"], timeout_s=20)
                assert done.stdout == "hello\n"
                answers.append(done.stdout)


@pytest.mark.bwrap
def test_a_server_stopped_under_load_answers_running_calls_and_leaves_nothing(tmp_path: Path) -> None:
    async def main(gateway: Gateway) -> None:
        played: list[str] = []
        worked: list[str] = []
        marker = new_marker()
        late = []

        async def last(client: SandboxClient) -> None:
            late.append(await client.get("slow").exec(["sh", "-c", f"sleep {marker}; echo woken"], timeout_s=60))

        async with SandboxClient(gateway.url) as client, anyio.create_task_group() as tasks:
            await client.create("slow", gateway.spec())
            tasks.start_soon(last, client)
            for number in range(8):
                tasks.start_soon(_play, gateway.url, number, played)
            for number in range(3):
                tasks.start_soon(_work, gateway, number, worked)
            await until(lambda: len(played) > 100 and len(worked) > 10 and bool(sleepers(marker)), 30)
            gateway.process.terminate()
            await anyio.sleep(0.2)
            os.kill(sleepers(marker)[0], signal.SIGKILL)  # now the command continues
            # Further signals are ignored at any time.
            while gateway.process.poll() is None:
                gateway.process.send_signal(signal.SIGTERM)
                gateway.process.send_signal(signal.SIGINT)
                await anyio.sleep(0.02)
        assert [one.stdout for one in late] == ["woken\n"]
        assert gateway.process.returncode == 0, gateway.log.read_text()
        assert gateway.left() == NOTHING

    with serving("local", tmp_path, "envs.sandboxes=2", "envs.warm=1") as gateway:
        run(lambda: main(gateway), 60)


@pytest.mark.bwrap
def test_a_server_stopped_during_its_start_leaves_nothing(tmp_path: Path) -> None:
    async def main(gateway: Gateway) -> None:
        await until(lambda: bool(gateway.left()["groups"]), 20)
        assert await gateway.end() == 0
        assert gateway.left() == NOTHING

    with serving("local", tmp_path, "envs.sandboxes=2", is_awaited=False) as gateway:
        run(lambda: main(gateway), 40)
