"""A host that plays on a server and outlasts the server's restarts."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Protocol

from envkit.errors import SandboxStartError, UnreachableError
from envkit.http.client.outages import Outages
from envkit.protocols import EnvHost, Episode
from envkit.types import Reset, Step, Task


class Client(Protocol):
    """What a `ReconnectingHost` uses of an `envkit.http.client.env_client.EnvClient`."""

    @property
    def capacity(self) -> int: ...
    @property
    def queued(self) -> int: ...
    def lease(self, task: Task, *, id: str | None = None) -> AbstractAsyncContextManager[Episode]: ...


class ReconnectingHost(EnvHost):
    """Plays episodes on a server; see `envkit.protocols.EnvHost`.

    During an outage of the server, leases wait for it, and steps in progress are sent again. The server plays a
    repeated step only once. If a restarted server no longer has an episode's session, the step raises
    `SessionNotFoundError`, and the episode is lost.

    Args:
        client: An open client of the server.
        outages: Repeats the calls during outages.
    """

    def __init__(self, client: Client, outages: Outages) -> None:
        self._client = client
        self._outages = outages

    @property
    def capacity(self) -> int:
        """Number of episode slots that this client may use on the server."""
        return self._client.capacity

    @property
    def queued(self) -> int:
        """Number of leases that wait for a slot, or for the server to be reachable."""
        return self._client.queued + self._outages.waiting_leases

    @asynccontextmanager
    async def lease(self, task: Task) -> AsyncIterator[Episode]:
        """Start an episode; see `EnvClient.lease`. Wait while the server is unreachable.

        Raises:
            EnvkitError: The server was unreachable for longer than the timeout; the message says what to do.
        """
        id = uuid.uuid4().hex
        async with AsyncExitStack() as stack:

            async def enter() -> Episode:
                return await stack.enter_async_context(self._client.lease(task, id=id))

            yield _Episode(await self._outages.call(enter, is_lease=True), self._outages)


class _Episode(Episode):
    """An episode of a `ReconnectingHost`."""

    def __init__(self, episode: Episode, outages: Outages) -> None:
        self._episode = episode
        self._outages = outages

    async def reset(self) -> Reset:
        try:
            return await self._episode.reset()
        except SandboxStartError as error:  # the episode is void and is played again
            raise UnreachableError(str(error)) from error

    async def step(self, action: str) -> Step:
        return await self._outages.call(partial(self._episode.step, action))

    async def grade(self) -> float | None:
        return await self._outages.call(self._episode.grade)
