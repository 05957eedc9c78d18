"""Requests to an ASGI application in this process, whose client can go at any moment."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio

from envkit import clock
from envkit.trainer_bridge.agents.proxy import AgentProxy


@dataclass
class Exchange:
    """A request and what was sent back.

    Attributes:
        parts: The parts of the response's body.
        most_parts: Number of parts after which the client closes the connection.
        raises: Whether a send to a client that has gone raises an error, as in some servers.
    """

    proxy: AgentProxy
    body: bytes
    path: str
    method: str = "POST"
    headers: Mapping[str, str] = field(default_factory=dict)
    most_parts: float = float("inf")
    raises: bool = False
    status: int = 0
    parts: list[bytes] = field(default_factory=list)
    has_gone: anyio.Event = field(default_factory=anyio.Event)
    is_over: anyio.Event = field(default_factory=anyio.Event)
    _has_sent: bool = False

    @property
    def content(self) -> bytes:
        return b"".join(self.parts)

    @property
    def json(self) -> Any:
        return json.loads(self.content)

    def drop(self) -> None:
        self.has_gone.set()

    async def play(self) -> Exchange:
        headers = [(name.lower().encode(), value.encode()) for name, value in self.headers.items()]
        scope = {"type": "http", "method": self.method, "path": self.path, "headers": headers}
        try:
            await self.proxy(scope, self._receive, self._send)
        finally:
            self.is_over.set()
        return self

    async def _receive(self) -> dict[str, Any]:
        if not self._has_sent:
            self._has_sent = True
            return {"type": "http.request", "body": self.body, "more_body": False}
        await self.has_gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if self.has_gone.is_set():
            if self.raises:
                raise OSError("the client has gone")
            return
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif message["body"]:
            self.parts.append(message["body"])
            if len(self.parts) >= self.most_parts:
                self.drop()


def exchange(proxy: AgentProxy, path: str, body: object = None, method: str = "POST", **options: Any) -> Exchange:
    """Return a request, to be played."""
    content = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    return Exchange(proxy, content, path, method, **options)


async def ask(proxy: AgentProxy, path: str, body: object = None, method: str = "POST", **options: Any) -> Exchange:
    """Play a request to its end."""
    return await exchange(proxy, path, body, method, **options).play()


@asynccontextmanager
async def waiting(proxy: AgentProxy, path: str, body: object, **options: Any) -> AsyncIterator[Exchange]:
    """Play a request beside the block."""
    async with clock.background_tasks() as tasks:
        played = exchange(proxy, path, body, **options)
        tasks.start_soon(played.play)
        await anyio.sleep(0.001)  # in virtual time: until it waits
        yield played
