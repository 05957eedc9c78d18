"""A gateway with nodes, each a real `envkit serve --node`: what the loss of a node or of the gateway costs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

import envkit
from envkit import clock
from envkit.http.auth.caller import ADMIN, NODE
from envkit.http.client.env_client import EnvClient
from envkit.http.client.sandbox_client import SandboxClient
from envkit.protocols import Episode
from envkit.types import Task
from envkit.wiring.gateway.token_store import open_tokens
from tests.cli.commands import envkit as envkit_command
from tests.e2e.fleet.fleet import Gateway, free_port, run, serving
from tests.programs.program import Program
from tests.programs.program import run as run_program

pytestmark = pytest.mark.slow

ENVKIT = (sys.executable, "-m", "envkit")
TASK = Task("Sokoban-v0", 11, {"size": 6, "boxes": 1, "max_moves": 30})
OPTIONS: dict[str, Any] = dict(TASK.options)
MOVES = ["up", "left", "down", "down", "right", "up", "left", "left"]
CLEAN = {name: value for name, value in os.environ.items() if name != "ENVKIT_TOKEN"}


@contextmanager
def node(port: int, *words: str, backend: str = "process") -> Iterator[subprocess.Popen[str]]:
    """A node on this machine, which the gateway names ``127.0.0.1:PORT``."""
    command = [*ENVKIT, "serve", "--node", "--backend", backend, "--port", str(port), *words]
    with Program(command, stdout=subprocess.PIPE, text=True, env=CLEAN) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == f"ready http://127.0.0.1:{port}\n"
            yield process
        finally:
            process.send_signal(signal.SIGCONT)
            process.terminate()
            process.wait(20)


def listed(*ports: int) -> tuple[str, ...]:
    """The settings of a gateway with these nodes and one sandbox for environments."""
    nodes = ", ".join(f"{{url: 'http://127.0.0.1:{port}'}}" for port in ports)
    return f"nodes=[{nodes}]", "envs.sandboxes=1", "envs.warm=0"


def local_episode() -> list[str]:
    """Return the observations of an undisturbed episode."""
    env = envkit.make(TASK.env_id, **OPTIONS)
    env.reset(seed=TASK.seed)
    observations = [env.step(f"<answer>{move}</answer>")[0] for move in MOVES]
    env.close()
    return observations


async def play(episode: Episode, moves: list[str]) -> list[str]:
    return [(await episode.step(f"<answer>{move}</answer>")).observation.text for move in moves]


@asynccontextmanager
async def playing(gateway: Gateway) -> AsyncIterator[Episode]:
    async with EnvClient(gateway.url) as client, client.lease(TASK) as episode:
        await episode.reset()
        yield episode


async def env_node(gateway: Gateway) -> str:
    """Return the node whose sandbox runs environments."""
    found = (await gateway.get("/v1/sandboxes"))["sandboxes"]
    return next(str(one["node"]) for one in found if one["sandbox_id"].startswith(":envs-") and alive(one["state"]))


def alive(state: str) -> bool:
    return state in ("leased", "suspect")


@pytest.mark.parametrize("loss", [signal.SIGKILL, signal.SIGSTOP])
def test_a_node_that_dies_or_hangs_loses_its_sandboxes_with_one_cause_and_episodes_go_on(
    loss: signal.Signals, tmp_path: Path
) -> None:
    async def main(gateway: Gateway, processes: dict[str, subprocess.Popen[str]]) -> None:
        async with SandboxClient(gateway.url) as client, playing(gateway) as episode:
            for name in "abcd":
                await client.create(name, gateway.spec())
            before = await play(episode, MOVES[:4])
            victim = await env_node(gateway)
            lost = [view.id for view in await client.views() if view.node == victim]
            kept = [view.id for view in await client.views() if view.node != victim]
            assert len(lost) > 1
            assert kept
            processes[victim].send_signal(loss)
            for id in lost:
                await gateway.becomes(id, "lost")
            ends = [(await client.view(id)).phases[-1].cause for id in lost]
            assert {cause.kind for cause in ends if cause is not None} == {"node_lost"}
            assert len(set(ends)) == 1
            assert before + await play(episode, MOVES[4:]) == local_episode()
            assert await env_node(gateway) != victim
            assert [(await client.get(id).exec(["echo", "on"])).stdout for id in kept] == ["on\n"] * len(kept)
            if loss is signal.SIGSTOP:  # the node that is back has none of the lost sandboxes
                processes[victim].send_signal(signal.SIGCONT)
                await becomes(client, victim, "up")

    ports = free_port(), free_port()
    with node(ports[0]) as first, node(ports[1]) as second, serving("nodes", tmp_path, *listed(*ports)) as gateway:
        processes = dict(zip((f"127.0.0.1:{port}" for port in ports), (first, second), strict=True))
        run(lambda: main(gateway, processes), 60)


async def becomes(client: SandboxClient, name: str, state: str) -> None:
    with anyio.fail_after(20):
        while next(one.state for one in await client.list_nodes() if one.node == name) != state:  # noqa: ASYNC110
            await anyio.sleep(0.05)


def test_a_killed_gateway_leaves_its_sandboxes_and_sessions_to_the_next(tmp_path: Path) -> None:
    tokens = open_tokens(tmp_path)
    to_use = tokens.create("t", [ADMIN], "use")
    to_join = tmp_path / "join"
    to_join.touch(mode=0o600)
    to_join.write_text(tokens.create("nodes", [NODE], "join"))
    port, seen = free_port(), list[str]()

    async def leave(gateway: Gateway) -> None:
        async with SandboxClient(gateway.url, to_use) as client:
            await client.create("a", gateway.spec())
            await client.get("a").write("kept", b"there")
        put = {"env_id": TASK.env_id, "seed": TASK.seed, "options": dict(TASK.options)}
        async with session(gateway) as call:
            assert (await call.put("/v1/sessions/game", json=put)).status_code == 200
            seen.extend([await step(call, turn) for turn in range(4)])
        gateway.process.kill()
        await gateway.exit_code()

    async def come_back(gateway: Gateway) -> None:
        async with SandboxClient(gateway.url, to_use) as client:
            assert await client.get("a").read("kept") == b"there"
        async with session(gateway) as call:
            seen.extend([await step(call, turn) for turn in range(4, len(MOVES))])
        assert seen == local_episode()

    def session(gateway: Gateway) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=gateway.url, headers={"Authorization": f"Bearer {to_use}"}, timeout=20)

    async def step(call: httpx.AsyncClient, turn: int) -> str:
        body = {"turn": turn, "action": f"<answer>{MOVES[turn]}</answer>"}
        answer = (await call.post("/v1/sessions/game/step", json=body)).json()
        return str(answer["observation"])

    settings = ("envs.sandboxes=1", "envs.warm=0")
    joining = ("--join", f"http://127.0.0.1:{port}", "--token-file", str(to_join))
    with node(free_port(), *joining):
        with serving("nodes", tmp_path, *settings, port=port) as gateway:
            run(lambda: leave(gateway), 40)
        with serving("nodes", tmp_path, *settings, port=port) as gateway:
            run(lambda: come_back(gateway), 40)


def test_nodes_are_upgraded_one_after_another_without_losing_an_episode(tmp_path: Path) -> None:
    def drain(gateway: Gateway, name: str) -> None:
        command = [*ENVKIT, "node", "drain", name, "--url", gateway.url]
        run_program(command, check=True, timeout=30, env=CLEAN)

    async def main(gateway: Gateway, ports: dict[str, int]) -> None:
        async with SandboxClient(gateway.url) as client, playing(gateway) as episode:
            seen = await play(episode, MOVES[:2])
            for moves in (MOVES[2:4], MOVES[4:6]):
                name = await env_node(gateway)
                await clock.to_thread(drain, gateway, name)
                assert await env_node(gateway) != name
                seen += await play(episode, moves)
                running[name].terminate()
                assert await clock.to_thread(running[name].wait, 20) == 0
                await becomes(client, name, "lost")
                opened.append(node(ports[name]))
                running[name] = opened[-1].__enter__()
                await becomes(client, name, "up")
            assert seen + await play(episode, MOVES[6:]) == local_episode()
            lost = [view for view in await client.views() if view.state == "lost"]
            assert lost == []

    numbers = free_port(), free_port()
    ports = {f"127.0.0.1:{number}": number for number in numbers}
    opened = [node(number) for number in numbers]
    running = {name: one.__enter__() for name, one in zip(ports, opened, strict=True)}
    try:
        with serving("nodes", tmp_path, *listed(*numbers)) as gateway:
            run(lambda: main(gateway, ports), 90)
    finally:
        for one in opened:
            one.__exit__(None, None, None)


def test_the_doctor_of_a_cluster_names_each_machine_that_does_not_work_and_what_to_do(tmp_path: Path) -> None:
    works, refuses, gone = (free_port() for _ in range(3))
    nodes = [{"url": f"http://127.0.0.1:{port}"} for port in (works, refuses, gone)]
    token, other = tmp_path / "token", tmp_path / "other"
    for file in (token, other):
        file.touch(mode=0o600)
        file.write_text(f"{file.name}-of-a-node-0123456789")
    nodes[1]["token_file"] = str(other)
    config = {"backend": "nodes", "listen": {"port": free_port()}, "nodes": nodes}
    (tmp_path / "fleet.yaml").write_text(json.dumps(config))
    with node(works), node(refuses, "--token-file", str(token)):
        code, output, _ = envkit_command("doctor", "--cluster", tmp_path / "fleet.yaml", "--json")
    found = {(one["machine"], one["check"]): one["remedy"] for one in json.loads(output)}
    wrong = {key: remedy for key, remedy in found.items() if remedy}
    checks = ("port", "token", "clock", "version", "architecture", "python")
    assert code == 1
    assert {check for machine, check in found if machine == f"127.0.0.1:{works}"} == set(checks)
    assert set(wrong) == {(f"127.0.0.1:{refuses}", "token"), (f"127.0.0.1:{gone}", "port")}
    assert "token_file" in wrong[f"127.0.0.1:{refuses}", "token"]
