"""The actor of a node connects clients to sandboxes, refuses clients without the secret, and ends orphans."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing

import anyio
import pytest

from envkit import clock
from envkit.errors import SandboxEndedError, SandboxRefusedError, from_problem
from envkit.sandbox.agent_client.channel import AgentChannel, SocketStream, Survived
from envkit.sandbox.agent_client.resources import HostResources
from envkit.sandbox.agent_client.sandbox import AgentSandbox
from envkit.sandbox.ray.node_agent import Answer, NodeActor, NodeKind, greeting
from envkit.types import Cause, SandboxSpec
from tests.causes import cause
from tests.contract.kinds import KINDS, run, traces


@asynccontextmanager
async def serving(kind: NodeKind = "local") -> AsyncIterator[tuple[NodeActor, Answer]]:
    """Run an actor, without a cluster, for the length of the block."""
    actor = NodeActor(kind, "127.0.0.1")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(actor.serve)
        yield actor, await actor.opened()
        assert await actor.close() == {}


async def dialled(opened: Answer, first: bytes) -> socket.socket:
    stream = socket.socket()
    stream.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(stream, (opened["host"], opened["port"]))
    await loop.sock_sendall(stream, first)
    return stream


@asynccontextmanager
async def visited(opened: Answer, request_id: int) -> AsyncIterator[AgentSandbox]:
    """Open a sandbox as a client on another machine sees it, and disconnect at the end."""

    async def nothing() -> None:
        return None

    async def broke(survived: Survived) -> Cause:
        return cause("the connection broke")

    stream = await dialled(opened, greeting(opened["secret"], request_id))
    sandbox = AgentSandbox(
        "far",
        AgentChannel(await SocketStream.open(stream)),
        HostResources(broke, nothing),
        work="/workspace",
        forget=lambda sandbox: None,
    )
    await sandbox.started({}, 20)
    try:
        yield sandbox
    finally:
        await sandbox.release()


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("local", marks=[pytest.mark.bwrap, pytest.mark.detached]),
        pytest.param("docker", marks=pytest.mark.docker),
    ],
)
@pytest.mark.parametrize("fast", [False, True], ids=["asyncio", "uvloop"])  # Ray's workers have the other loop
def test_a_client_with_the_secret_reaches_the_sandbox_and_large_files_arrive_whole(kind: NodeKind, fast: bool) -> None:
    before = traces()

    async def main() -> None:
        async with serving(kind) as (actor, opened):
            assert opened["capabilities"]["isolation"] is True
            made = await actor.start(7, KINDS[kind].spec(), 30.0, None)
            assert (made["work"], made["unenforced"]) == ("/workspace", [])
            async with visited(opened, 7) as sandbox:
                assert (await sandbox.exec(["cat"], stdin=b"hello", timeout_s=20)).stdout == "hello"
                content = bytes(range(256)) * (80 << 10)  # 20 MiB
                await sandbox.write("file", content)
                assert await sandbox.read("file") == content
                await sandbox.stop()
            assert await actor.stop(7) == {}

    clock.run(main, fast=fast)
    assert traces() == before


@pytest.mark.bwrap
@pytest.mark.detached
def test_a_client_without_the_secret_is_disconnected_without_an_answer() -> None:
    async def main() -> None:
        async with serving() as (actor, opened):
            await actor.start(1, SandboxSpec(), 30.0, None)
            secret = str(opened["secret"])
            wrong = (greeting("", 1), greeting("0" * 64, 1), greeting(secret, 2))
            for words in (*wrong, b"\n", b"x" * 300, b"GET / HTTP/1.1\r\n\r\n"):
                with closing(await dialled(opened, words)) as stream, anyio.fail_after(5):
                    assert await asyncio.get_running_loop().sock_recv(stream, 100) == b""
            async with visited(opened, 1) as sandbox:
                assert await sandbox.probe(5) < 5

    run(main)


@pytest.mark.bwrap
@pytest.mark.detached
def test_why_a_sandbox_is_gone_and_what_cannot_be_started_are_answers() -> None:
    async def main() -> None:
        async with serving() as (actor, _):
            await actor.start(1, SandboxSpec(("sh", "-c", "sleep 1; exit 3")), 30.0, None)
            ended = {"kind": "exited", "detail": "exited with code 3", "by_agent": True}
            assert await actor.cause(1) == {"cause": ended}
            await actor.start(2, SandboxSpec(), 30.0, None)
            assert await actor.cause(2) == {"cause": None}
            assert await actor.diagnose(2) == {"diagnose": ""}
            refused = from_problem((await actor.start(3, SandboxSpec(image="/nowhere"), 30.0, None))["problem"])
            assert isinstance(refused, SandboxRefusedError)
            assert "'/nowhere' is not a folder" in refused.cause.detail
            failed = from_problem((await actor.start(4, SandboxSpec(("no-such-program",)), 30.0, None))["problem"])
            assert isinstance(failed, SandboxEndedError)
            assert "exited with code 127: no-such-program" in failed.cause.detail
            unknown = from_problem((await actor.cause(3))["problem"])
            assert str(unknown) == "the node has no such sandbox"

    run(main)


@pytest.mark.bwrap
@pytest.mark.detached
def test_files_are_kept_on_the_node_and_not_taken_for_those_of_an_actor_before() -> None:
    async def main() -> None:
        async with serving() as (actor, opened):
            await actor.start(1, SandboxSpec(), 30.0, None)
            async with visited(opened, 1) as sandbox:
                await sandbox.write("kept", b"x")
            name = (await actor.snapshot(1))["name"]
            await actor.start(2, SandboxSpec(), 30.0, name)
            async with visited(opened, 2) as sandbox:
                assert await sandbox.read("kept") == b"x"
            refused = await actor.start(3, SandboxSpec(), 30.0, f"{name[:-1]}_")
            assert "there is no snapshot" in refused["problem"]["detail"]
            assert (await actor.snapshot_bytes(f"{name}_"), await actor.remove_snapshot(f"{name}_")) == (
                {"bytes": 0},
                {},
            )
            assert (await actor.snapshot_bytes(name))["bytes"] > 0
            assert await actor.remove_snapshot(name) == {}
            assert await actor.snapshot_bytes(name) == {"bytes": 0}

    run(main)


def test_an_address_that_is_not_the_nodes_is_an_answer_too() -> None:
    async def main() -> None:
        actor = NodeActor("local", "192.0.2.77")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(actor.serve)
            assert "Cannot assign requested address" in (await actor.opened())["problem"]["detail"]

    run(main)
