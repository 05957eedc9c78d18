"""A host that plays on a server and outlasts the server's restarts, for training runs."""

from __future__ import annotations

import random
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Protocol, TypeVar

import anyio

from envkit import clock
from envkit.errors import EnvkitError, SandboxStartError, UnreachableError
from envkit.protocols import EnvHost, Episode
from envkit.types import Reset, Step, Task

T = TypeVar("T")


class _Retry(Protocol):
    async def __call__(self, call: Callable[[], Awaitable[T]], /) -> T: ...


_DELAYS_S = (0.1, 2.0)
"""Backoff: initial and maximum seconds between two attempts to reach the server."""


class Client(Protocol):
    """What a `ReconnectingHost` uses of an `envkit.http.client.env_client.EnvClient`."""

    @property
    def capacity(self) -> int: ...
    @property
    def queued(self) -> int: ...
    def lease(self, task: Task, *, id: str | None = None) -> AbstractAsyncContextManager[Episode]: ...


class ReconnectingHost(EnvHost):
    """Plays episodes on a server; see `envkit.protocols.EnvHost`.

    While the server is unreachable, is shutting down, or refuses calls that may succeed later, leases wait for it, and
    steps in progress are sent again. The server plays a repeated step only once. If a restarted server no longer has an
    episode's session, the step raises `SessionNotFoundError`, and the episode is lost.

    Args:
        client: An open client of the server.
        outage_timeout_s: Maximum seconds to wait for the server.
        announce: Called with one line when an outage begins.
    """

    def __init__(self, client: Client, *, outage_timeout_s: float, announce: Callable[[str], None]) -> None:
        self._client = client
        self._outage_timeout_s = outage_timeout_s
        self._announce = announce
        self._waiting = 0
        self._down_since: float | None = None
        self._rng = random.Random()

    @property
    def capacity(self) -> int:
        """Number of episode slots that this client may use on the server."""
        return self._client.capacity

    @property
    def queued(self) -> int:
        """Number of leases that wait for a slot, or for the server to be reachable."""
        return self._client.queued + self._waiting

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

            yield _Episode(await self._retry(enter, is_lease=True), self._retry)

    async def _retry(self, call: Callable[[], Awaitable[T]], *, is_lease: bool = False) -> T:
        """Make a call that may be repeated, again and again until the server answers.

        Raises:
            EnvkitError: As `call`, or the outage has exceeded its timeout.
        """
        delay_s, max_s = _DELAYS_S
        while True:
            try:
                answer = await call()
            except EnvkitError as error:
                if not error.retry:
                    self._down_since = None  # the server answered
                    raise
                self._check_outage(error)
            except anyio.get_cancelled_exc_class():
                if self._down_since is not None and not is_lease:
                    self._down_since = None  # the caller gave up; the next call starts a new count
                raise
            else:
                self._down_since = None
                return answer
            self._waiting += is_lease
            try:
                await anyio.sleep(delay_s * self._rng.uniform(0.5, 1.0))  # jitter
            finally:
                self._waiting -= is_lease
            delay_s = min(2 * delay_s, max_s)

    def _check_outage(self, error: EnvkitError) -> None:
        """Record that the server did not answer, with `error`; raise an error if the outage has lasted too long."""
        now, limit_s = clock.now(), self._outage_timeout_s
        if self._down_since is None:
            self._down_since = now
            self._announce(f"env.url: {error}; waiting up to {limit_s:g} s for the server")
        if now - self._down_since >= limit_s:
            what = "lost the server" if isinstance(error, UnreachableError) else "the server refused calls"
            raise EnvkitError(
                f"env.url: {what} for {limit_s:g} s: {error}; once it plays episodes again, continue the run with "
                "--resume"
            ) from None


class _Episode(Episode):
    """An episode of a `ReconnectingHost`."""

    def __init__(self, episode: Episode, retry: _Retry) -> None:
        self._episode = episode
        self._retry = retry

    async def reset(self) -> Reset:
        try:
            return await self._episode.reset()
        except SandboxStartError as error:  # the episode is void and is played again
            raise UnreachableError(str(error)) from error

    async def step(self, action: str) -> Step:
        return await self._retry(partial(self._episode.step, action))

    async def grade(self) -> float | None:
        return await self._retry(self._episode.grade)
