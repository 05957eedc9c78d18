"""Nodes that join a gateway: which are refused, and what odd ones cannot do to it."""

from __future__ import annotations

import stat
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import httpx
import msgspec
import pytest

from envkit import clock
from envkit.config.serving import ServeConfig
from envkit.errors import OptionError, SandboxLostError, UsageError
from envkit.fleet.remote_node import RemoteNode
from envkit.http.api.app import create_app
from envkit.http.auth.caller import Caller
from envkit.http.auth.tokens import OneToken, TokenStore
from envkit.http.protocol.node_messages import JoinFrame
from envkit.http.server.middleware import AuthMiddleware
from envkit.sandbox.pool import Pool
from envkit.sandbox.pool.node import Capacity, Node
from envkit.types import CauseKind, SandboxSpec
from envkit.wiring.gateway.node_server import NodeFacts, node_app, node_pool, serve_node
from envkit.wiring.gateway.remote_nodes import RemoteNodes
from envkit.wiring.gateway.trusted import NoEnvironments
from tests.contract.kinds import until
from tests.http.envs import listening
from tests.sandbox.fake.backend import FakeBackend

NOWHERE = "http://127.0.0.1:1"


def with_nodes(main: Callable[[RemoteNodes], Awaitable[None]], file: Path, *listed: JoinFrame) -> None:
    async def run() -> None:
        async with RemoteNodes(listed, file=file, in_image=False, isolates=None, lost_s=1.0) as nodes:
            await main(nodes)

    clock.run(run)


@pytest.mark.parametrize(
    ("url", "token"),
    [
        *[(url, "t") for url in ("", "ftp://x:1", "http://h\0:1", "http://h:99999")],
        *[(NOWHERE, token) for token in ("", "a b", "é")],
    ],
)
def test_a_join_without_a_usable_address_or_token_is_refused_and_not_remembered(
    url: str, token: str, tmp_path: Path
) -> None:
    async def main(nodes: RemoteNodes) -> None:
        with pytest.raises(OptionError):
            await nodes.join(JoinFrame("n", url, token), Caller())
        assert nodes.states() == []

    with_nodes(main, tmp_path / "joined.json")
    assert not (tmp_path / "joined.json").exists()


def test_the_file_of_joined_nodes_is_private_and_odd_entries_in_it_end_nothing(tmp_path: Path) -> None:
    file = tmp_path / "joined.json"
    file.write_bytes(msgspec.json.encode([JoinFrame("odd", f"http://{'a' * 64}:1", "t")]))

    async def main(nodes: RemoteNodes) -> None:
        await nodes.join(JoinFrame("n", NOWHERE, "t"), Caller())
        odd, new = nodes.states()
        assert odd.why.startswith("it cannot be used: UnicodeError")
        assert (new.node, new.state) == ("n", "lost")

    with_nodes(main, file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert {one.node for one in msgspec.json.decode(file.read_bytes(), type=list[JoinFrame])} == {"odd", "n"}


def test_a_folder_without_room_for_the_file_ends_nothing(tmp_path: Path) -> None:
    async def main(nodes: RemoteNodes) -> None:
        await nodes.join(JoinFrame("n", NOWHERE, "t"), Caller())
        assert [one.node for one in nodes.states()] == ["n"]

    with_nodes(main, tmp_path / "gone" / "joined.json")


def test_the_servers_own_token_is_not_sent_to_a_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENVKIT_TOKEN", "ek_of_the_server")
    received: list[bytes] = []

    async def main() -> None:
        async def answer(stream: anyio.abc.SocketStream) -> None:
            async with stream:
                received.append(await stream.receive())

        listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        async with listener, anyio.create_task_group() as tasks:
            tasks.start_soon(listener.serve, answer)
            node = JoinFrame("n", f"http://127.0.0.1:{port}", "")
            async with RemoteNodes([node], file=None, in_image=False, isolates=None, lost_s=1.0):
                pass
            tasks.cancel_scope.cancel()

    clock.run(main)
    assert received
    assert all(b"Upgrade: websocket" in head and b"ek_of_the_server" not in head for head in received)


STATUS = {
    ("GET", "/v1/nodes"): {"play,sandbox": 403, "node": 403, "admin": 200, None: 401},
    ("POST", "/v1/nodes/n/drain"): {"play,sandbox": 403, "node": 403, "admin": 422, None: 401},
    ("POST", "/v1/nodes:join"): {"play,sandbox": 403, "node": 200, "admin": 200, None: 401},
}
"""The status of each call to a gateway, by the scopes of the token. A drain of an unknown node is a wrong option."""


def test_only_an_admin_lists_and_drains_nodes_and_only_a_node_joins(tmp_path: Path) -> None:
    tokens = TokenStore(tmp_path / "tokens.sqlite")
    secrets = {scopes: tokens.create("acme", scopes.split(",")) for scopes in ("play,sandbox", "node", "admin")}
    bodies = {"/v1/nodes/n/drain": {}, "/v1/nodes:join": {"node": "m", "url": NOWHERE, "token": "t"}}

    async def main(nodes: RemoteNodes) -> None:
        app = create_app(NoEnvironments(), lazy=True, handlers=(nodes,))
        async with (
            listening(AuthMiddleware(app, tokens, errors=app.errors)) as address,
            httpx.AsyncClient(base_url=address, trust_env=False) as client,
        ):
            for (verb, path), wanted in STATUS.items():
                for scopes, status in wanted.items():
                    headers = {"Authorization": f"Bearer {secrets[scopes]}"} if scopes else {}
                    reply = await client.request(verb, path, headers=headers, json=bodies.get(path))
                    assert (path, scopes, reply.status_code) == (path, scopes, status), reply.text

    with_nodes(main, tmp_path / "joined.json")


@asynccontextmanager
async def node_at(token: str) -> AsyncIterator[str]:
    async with FakeBackend() as backend, node_pool(node := Node("here", backend)) as pool:
        app = node_app(NodeFacts(node, "process"), pool)
        async with listening(AuthMiddleware(app, OneToken(token), errors=app.errors)) as address:
            yield address


def test_a_node_that_was_started_again_at_another_address_is_used_there() -> None:
    async def main() -> None:
        addresses = {"n": JoinFrame("n", NOWHERE, "own")}
        async with node_at("own") as address:
            with anyio.fail_after(20):
                async with RemoteNodes(
                    addresses.values(), file=None, in_image=False, isolates=None, lost_s=1.0
                ) as nodes:
                    assert not nodes.nodes
                    addresses["n"] = JoinFrame("n", address, "own")
                    await nodes.found.wait()

    clock.run(main)


def test_a_node_that_joins_again_with_another_address_and_token_is_used_there() -> None:
    async def main() -> None:
        async with (
            node_at("old") as before,
            node_at("new") as after,
            RemoteNodes([], file=None, in_image=False, isolates=None, lost_s=1.0) as nodes,
        ):
            await nodes.join(JoinFrame("n", before, "old"), Caller())
            await nodes.found.wait()
            await nodes.join(JoinFrame("n", after, "new"), Caller())
            await until(lambda: [one.state for one in nodes.states()] == ["lost"])
            await until(lambda: [one.state for one in nodes.states()] == ["up"])
            (node,) = nodes.nodes
            assert isinstance(node.backend, RemoteNode)
            assert node.backend.transport.address == after

    clock.run(main)


def test_a_node_starts_what_its_gateway_orders_beyond_its_capacity() -> None:
    async def main() -> None:
        async with FakeBackend() as backend, node_pool(Node("here", backend, Capacity(sandboxes=1))) as pool:
            for id in ("a", "b"):
                await pool.create(id, SandboxSpec(), wait_s=0)
                pool.get(id)

    clock.run(main, virtual=True)


def test_a_sandbox_outlives_its_gateway_by_its_time_to_live() -> None:
    async def main() -> None:
        async with FakeBackend() as backend, node_pool(Node("here", backend)) as pool:
            await pool.create("a", SandboxSpec(), ttl_s=30)
            await anyio.sleep(20)
            pool.get("a")  # a gateway that is connected uses it
            await anyio.sleep(25)
            pool.get("a")
            await anyio.sleep(32)
            with pytest.raises(SandboxLostError) as found:
                pool.get("a")
            assert found.value.cause.kind is CauseKind.EXPIRED

    clock.run(main, virtual=True)


def test_a_node_answers_only_its_own_token_and_is_no_gateway() -> None:
    async def main() -> None:
        async with FakeBackend() as backend, Pool() as pool:
            app = node_app(NodeFacts(Node("here", backend), "process"), pool)
            async with (
                listening(AuthMiddleware(app, OneToken("own"), errors=app.errors)) as address,
                httpx.AsyncClient(base_url=address, trust_env=False) as client,
            ):
                for path, token, status in [
                    ("/v1/node", "", 401),
                    ("/v1/node", "Bearer other", 401),
                    ("/v1/node", "Bearer own", 200),
                    ("/v1/nodes", "Bearer own", 404),
                ]:
                    reply = await client.get(path, headers={"Authorization": token} if token else {})
                    assert reply.status_code == status, reply.text
                assert "this server is a node itself" in reply.text

    clock.run(main)


def test_keys_that_a_node_ignores_are_refused() -> None:
    config = ServeConfig.model_validate({"model": "m", "nodes": [{"url": NOWHERE}], "envs": {"sandboxes": 2}})

    async def main() -> None:
        await serve_node(config, join=None, token_file=None, announce=print)

    with pytest.raises(UsageError, match=r"^nodes, model, envs\.sandboxes: no effect on a node"):
        clock.run(main)
