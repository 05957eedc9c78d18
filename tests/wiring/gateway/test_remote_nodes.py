"""Nodes that join a gateway: which are refused, and what odd ones cannot do to it."""

from __future__ import annotations

import stat
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import msgspec
import pytest

from envkit import clock
from envkit.errors import OptionError
from envkit.http.auth.caller import Caller
from envkit.http.protocol.node_messages import JoinFrame
from envkit.wiring.gateway.remote_nodes import NodeAddress, RemoteNodes

NOWHERE = "http://127.0.0.1:1"


def with_nodes(main: Callable[[RemoteNodes], Awaitable[None]], file: Path, *listed: NodeAddress) -> None:
    async def run() -> None:
        async with RemoteNodes(listed, file=file, in_image=False, isolates=None, lost_s=1.0) as nodes:
            await main(nodes)

    clock.run(run)


@pytest.mark.parametrize(
    ("url", "token"),
    [
        *[(url, "t") for url in ("", "ftp://x:1", "http://", "http://..:1", "http://h\0:1", "http://h:99999")],
        *[
            (url, "t")
            for url in (f"http://{'a' * 64}:1", "http://ü:1", "http://h:0", "http://[::g]:1", "unix:", "http://h:1\n")
        ],
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
            node = NodeAddress("n", f"http://127.0.0.1:{port}")
            async with RemoteNodes([node], file=None, in_image=False, isolates=None, lost_s=1.0):
                pass
            tasks.cancel_scope.cancel()

    clock.run(main)
    assert received
    assert all(b"Upgrade: websocket" in head and b"ek_of_the_server" not in head for head in received)
