"""The client against servers that misbehave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest
from websockets.asyncio.server import ServerConnection, serve

from envkit import clock
from envkit.errors import EnvkitError, RequestError, UnreachableError
from envkit.http.client.connect import connect_bytes
from envkit.http.client.env_client import EnvClient

HONEST = '{"id":%d,"result":{"ready":true,"capacity":1,"leased":0,"version":"1"}}'


class Scripted:
    """A server that answers each message by its script (None closes the socket), and correctly after its end."""

    def __init__(self, *script: str | None) -> None:
        self.messages: list[list[Any]] = []
        self._script = [HONEST, *script]  # a client starts with a health call

    async def __call__(self, socket: ServerConnection) -> None:
        async for message in socket:
            content = json.loads(message)
            frames = content if isinstance(content, list) else [content]
            self.messages.append(frames)
            template = self._script.pop(0) if self._script else HONEST
            if template is None:
                return
            answers = [template % frame["id"] if "%d" in template else template for frame in frames]
            await socket.send("[" + ",".join(answers) + "]")


def against(server: Scripted, main: Callable[[EnvClient], Awaitable[None]]) -> None:
    async def run() -> None:
        async with serve(server, "127.0.0.1", 0) as listening:
            port = next(iter(listening.sockets)).getsockname()[1]
            with anyio.fail_after(20):
                async with EnvClient(f"http://127.0.0.1:{port}", timeout_s=5) as client:
                    await main(client)

    clock.run(run)


def test_calls_of_one_loop_iteration_are_sent_in_one_message() -> None:
    async def main(client: EnvClient) -> None:
        async with anyio.create_task_group() as tasks:
            for _ in range(10):
                tasks.start_soon(client.health)

    server = Scripted()
    against(server, main)
    assert [len(frames) for frames in server.messages] == [1, 10]


def test_a_call_that_breaks_two_sockets_is_not_tried_a_third_time() -> None:
    async def main(client: EnvClient) -> None:
        with pytest.raises(UnreachableError, match="closed the connection during 'health' twice"):
            await client.health()
        assert (await client.health()).version == "1"

    server = Scripted(None, None)
    against(server, main)
    assert [frames[0]["method"] for frames in server.messages] == ["ready", "health", "health", "health"]


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        ("nonsense", UnreachableError, "sent an invalid answer"),
        ('{"id":[]}', UnreachableError, "sent an invalid answer"),
        ('{"id":%d}', RequestError, "sent an invalid answer to 'health'"),
        ('{"id":%d,"result":null}', RequestError, "sent an invalid answer to 'health'"),
        ('{"id":%d,"result":{"version":7}}', RequestError, "sent an invalid answer to 'health'"),
        ('{"id":%d,"error":{"type":"no_such_code","detail":"strange"}}', EnvkitError, "strange"),
        ('{"id":%d,"error":{"type":"env_error","fields":{"x":1},"detail":"strange"}}', EnvkitError, "strange"),
        (
            '{"id":%d,"error":{"type":"unknown_env","fields":{"env_id":1,"known":[2],"hint":0},"detail":"strange"}}',
            EnvkitError,
            "strange",
        ),
        ('{"id":%d,"error":{}}', EnvkitError, "without details"),
    ],
)
def test_an_invalid_answer_is_an_error_of_its_call(answer: str, error: type[EnvkitError], message: str) -> None:
    async def main(client: EnvClient) -> None:
        with pytest.raises(error, match=message):
            await client.health()
        assert (await client.health()).version == "1"

    against(Scripted(answer), main)


def test_an_answer_without_a_waiting_call_is_ignored() -> None:
    async def main(client: EnvClient) -> None:
        assert (await client.health()).version == "1"

    against(Scripted('{"id":99,"result":{}},{"id":null,"error":{}},' + HONEST), main)


def test_what_a_server_sends_together_with_the_head_belongs_to_the_connection() -> None:
    async def answer(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            await stream.receive()
            await stream.send(b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\n\r\nSSH-2.0-greeting\r\n")

    async def run() -> None:
        listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        async with listener, anyio.create_task_group() as tasks:
            tasks.start_soon(listener.serve, answer)
            with await connect_bytes(f"http://127.0.0.1:{port}", "/path", 5, token=None) as stream:
                assert await asyncio.get_running_loop().sock_recv(stream, 100) == b"SSH-2.0-greeting\r\n"
            tasks.cancel_scope.cancel()

    clock.run(run)
