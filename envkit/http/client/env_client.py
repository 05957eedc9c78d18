"""The client of a server: episodes played elsewhere, over one socket, behind the same protocol as any other host."""

from __future__ import annotations

import os
import random
import uuid
from asyncio import Future
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self, TypeAlias, TypeVar

import anyio
import msgspec
from anyio.abc import TaskGroup
from websockets.asyncio.client import ClientConnection

from envkit.errors import (
    CapacityError,
    EnvError,
    EnvkitError,
    OptionError,
    RequestError,
    SandboxError,
    StepOrderError,
    UnreachableError,
    UsageError,
)
from envkit.http.client.connect import OpenSocket, dial_socket, dial_url
from envkit.http.client.connection import SharedWebSocket
from envkit.http.protocol import messages
from envkit.protocols import ResumableEpisode
from envkit.types import Reset, Step, Task

TIMEOUT_S = 60.0
"""Seconds that a call may take, unless the caller says otherwise."""

TOKEN_VARIABLE = "ENVKIT_TOKEN"
"""Variable that holds the token of a client that is given none."""

_DELETE_TIMEOUT_S = 5.0
_FULL_DELAYS_S = (0.01, 1.0)
"""Seconds between looking whether a full server has room again: at first, and at most."""

_STEP = msgspec.json.Decoder(messages.StepReply)

T = TypeVar("T")
Ask: TypeAlias = Callable[[messages.SessionStepBody], Future[msgspec.Raw]]
Read: TypeAlias = Callable[[msgspec.Raw], messages.StepReply]


class EnvClient:
    """Plays episodes on a server; satisfies `envkit.protocols.EnvHost`. Enter it to connect.

    Everything goes over one socket. If that breaks, it is made again and what had no answer is asked again. A server
    that cannot be reached again fails the calls that wait for it; later calls try anew.

    Args:
        url: Where the server is: ``"http://host:port"``, ``"https://host"`` or ``"unix:/path/of/socket"``.
        connect: Instead of `url`: gives a connected stream socket, once for each time that one is needed.
        name: How errors name a server that has no `url`.
        timeout_s: Seconds that a call may take.
        token: What to show the server at `url`; the variable ``ENVKIT_TOKEN``, unless given.
        ca: PEM file of the certificates that an ``https://`` server is trusted by, instead of the system's.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        token: str | None = None,
        ca: Path | str | None = None,
        connect: OpenSocket | None = None,
        name: str = "the server behind a socket",
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        if (url is None) == (connect is None):
            raise UsageError("a client needs a url or a way to connect, not both")
        if timeout_s <= 0:
            raise UsageError(f"timeout_s must be above 0, got {timeout_s}")
        self._address = name if url is None else url.rstrip("/")
        self._timeout_s = timeout_s
        if connect is None:
            token = token or os.environ.get(TOKEN_VARIABLE) or None
            dial = dial_url(self._address, timeout_s, token=token, ca=ca)
        else:  # to a box, say, whose programs must see no token
            if token is not None or ca is not None:
                raise UsageError("a token and certificates go with a url, not with a way to connect")
            dial = dial_socket(connect, timeout_s)
        self._channel = SharedWebSocket(self._address, dial)
        self._rng = random.Random()
        self._tasks: TaskGroup  # made on entering, since only then there is a loop
        self._carrying: anyio.CancelScope
        self._capacity = 0
        self._door: anyio.Lock
        self._left: anyio.Event

    @property
    def address(self) -> str:
        """How errors name the server."""
        return self._address

    @property
    def capacity(self) -> int:
        """Number of episodes at once, as the server said when it was connected to or last asked."""
        return self._capacity

    @asynccontextmanager
    async def lease(self, task: Task, *, id: str | None = None) -> AsyncIterator[ResumableEpisode]:
        """Give an episode, waiting while the server is full; see `envkit.protocols.EnvHost.lease`.

        The episode's world is reset on the way in, so that a missing world is known here; what else a reset raises is
        raised by `Episode.reset`.

        Args:
            task: What to play.
            id: Name of its session on the server, where one of this task goes on if there is one; None is a new name.

        Raises:
            UnknownEnvError: No environment has the task's id.
            DeadlineError: The server did not answer in time.
            UnreachableError: The server is gone.
        """
        id = uuid.uuid4().hex if id is None else id
        is_reachable = True
        try:
            yield await self._create(id, task)
        except UnreachableError:
            is_reachable = False
            raise
        finally:
            if is_reachable:
                await self._delete(id)
            left, self._left = self._left, anyio.Event()
            left.set()

    async def health(self) -> messages.HealthReply:
        """Ask for a sign of life."""
        return await self._call("health", messages.NoBody(), messages.HealthReply)

    async def ready(self) -> messages.ReadyReply:
        """Ask whether an episode could be leased now."""
        ready = await self._call("ready", messages.NoBody(), messages.ReadyReply)
        self._capacity = ready.capacity
        return ready

    async def envs(self) -> list[messages.EnvReply]:
        """Ask which environments can be played."""
        return (await self._call("envs", messages.NoBody(), messages.EnvsReply)).envs

    async def __aenter__(self) -> Self:
        socket = await self._channel.open()
        self._door, self._left = anyio.Lock(), anyio.Event()
        # Whoever is cancelled still ends what it has begun, which needs the socket.
        self._carrying = anyio.CancelScope(shield=True)
        self._tasks = await anyio.create_task_group().__aenter__()
        self._tasks.start_soon(self._carry, socket)
        try:
            await self.ready()
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop()

    async def _carry(self, socket: ClientConnection) -> None:
        with self._carrying:
            await self._channel.run(socket)

    async def _stop(self) -> None:
        self._carrying.cancel()
        self._tasks.cancel_scope.cancel()
        # Not told of the block's own error, which it would wrap in a group.
        await self._tasks.__aexit__(None, None, None)

    async def _create(self, id: str, task: Task) -> ResumableEpisode:
        """Make a session as soon as there is room."""
        body = messages.CreateSessionBody(task.env_id, task.seed, dict(task.options), session_id=id)

        has_places = True
        if self._door.locked():  # others were here before
            has_places = await self._room()
        while True:
            try:
                reply = await self._call("create", body, messages.ResetReply)
            except CapacityError:
                if not has_places:
                    raise
                has_places = await self._room()
            except (OptionError, EnvError, SandboxError) as error:
                return _RemoteEpisode(id, error, 0, self._ask_step, self._read_step)
            else:
                return _RemoteEpisode(id, reply.reset(), reply.turn, self._ask_step, self._read_step)

    async def _delete(self, id: str) -> None:
        """Give an episode's place back; if that fails, the session expires."""
        with anyio.CancelScope(shield=True), suppress(EnvkitError):
            await self._call("delete", messages.SessionBody(id), messages.DoneReply, timeout_s=_DELETE_TIMEOUT_S)

    async def _room(self) -> bool:
        """Wait until the server has room; one asks at a time, however many wait. False if it has no place at all."""
        first_s, most_s = _FULL_DELAYS_S
        delay_s = first_s
        async with self._door:
            while not (await self.ready()).ready:
                if not self._capacity:
                    return False
                with anyio.move_on_after(delay_s * self._rng.uniform(0.5, 1.0)):  # not all clients in step
                    await self._left.wait()
                delay_s = min(2 * delay_s, most_s)
        return True

    async def _call(self, method: str, body: msgspec.Struct, reply: type[T], *, timeout_s: float | None = None) -> T:
        result = await self._channel.call(method, body, self._timeout_s if timeout_s is None else timeout_s)
        return self._read(method, result, msgspec.json.Decoder(reply))

    def _ask_step(self, body: messages.SessionStepBody) -> Future[msgspec.Raw]:
        return self._channel.start_call("step", body, self._timeout_s)

    def _read_step(self, result: msgspec.Raw) -> messages.StepReply:
        return self._read("step", result, _STEP)

    def _read(self, method: str, result: msgspec.Raw, decoder: msgspec.json.Decoder[T]) -> T:
        try:
            return decoder.decode(result)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{self._address} answers {method!r} in a way that cannot be read: {error}") from None


class _RemoteEpisode:
    """An episode that is played on a server."""

    def __init__(self, id: str, start: Reset | EnvkitError, turn: int, ask: Ask, read: Read) -> None:
        self.turn = turn
        self._id = id
        self._start = start
        self._ask = ask
        self._read = read
        self._is_reset = False

    async def reset(self) -> Reset:
        if isinstance(self._start, EnvkitError):
            raise self._start
        self._is_reset = True
        return self._start

    async def step(self, action: str) -> Step:
        if not self._is_reset:
            raise StepOrderError("step before reset")
        return self._played(await self._asked(self.turn, action))

    async def repeat_step(self, action: str) -> Step:
        return self._played(await self._asked(self.turn - 1, action))

    def start_step(self, action: str) -> Future[msgspec.Raw] | None:
        return self._asked(self.turn, action) if self._is_reset else None

    def finish_step(self, answer: Future[msgspec.Raw]) -> Step:
        return self._played(answer.result())

    def _asked(self, turn: int, action: str) -> Future[msgspec.Raw]:
        sayable = action.encode(errors="replace").decode()  # a lone surrogate is no text, yet an action like any other
        return self._ask(messages.SessionStepBody(turn, sayable, session_id=self._id))

    def _played(self, result: msgspec.Raw) -> Step:
        reply = self._read(result)
        step = reply.step()
        self.turn = reply.turn
        return step
