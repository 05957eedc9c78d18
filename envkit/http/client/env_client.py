"""The client of an environment server: plays episodes over one WebSocket."""

from __future__ import annotations

import math
import os
import random
import uuid
from asyncio import Future
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import anyio
import msgspec

from envkit import clock
from envkit.errors import (
    CapacityError,
    EnvError,
    EnvkitError,
    OptionError,
    SandboxError,
    StepOrderError,
    UnreachableError,
    UsageError,
)
from envkit.http.client.connect import OpenSocket, socket_connector, url_connector
from envkit.http.client.connection import SharedWebSocket
from envkit.http.client.outages import Outages
from envkit.http.protocol import messages
from envkit.http.protocol import operations as table
from envkit.http.protocol.operations import Operation, Q, R
from envkit.protocols import EnvHost, Episode
from envkit.types import Reset, Step, Task, deadline_s

TIMEOUT_S = 60.0
"""Default timeout of a call, in seconds."""

SLOW_TIMEOUT_S = 600.0
"""Default timeout of a reset, and of a grader, in seconds."""

TOKEN_VARIABLE = "ENVKIT_TOKEN"
"""Environment variable with the default token."""

_SHORT = 150_000
"""Number of characters of an action that always fit into a request, and to which a longer one is cut."""
_REST_BYTES = 1024
"""Maximum bytes of a step's request without the action."""
_DELETE_TIMEOUT_S = 5.0
_POLL_DELAYS_S = (0.01, 1.0)
"""Initial and maximum seconds between two checks whether a full server has a free slot again."""


class EnvClient(EnvHost):
    """Plays episodes on a server. Use it with ``async with``, which connects.

    All calls share one WebSocket. If the WebSocket breaks, the client reconnects and sends unanswered calls again. If
    the server stays unreachable, the unanswered calls fail, and the next call tries to reconnect.

    With `outages`, leases wait while the server restarts, and steps and graders in progress are sent again; the server
    plays a repeated step only once. If the restarted server no longer has an episode's session, the step raises
    `SessionNotFoundError`, and the episode is lost.

    Args:
        url: Address of the server: ``"http://host:port"``, ``"https://host"`` or ``"unix:/path/of/socket"``.
        connect: Function to pass instead of `url`. Each call returns a new stream socket, connected to the server.
        name: The server's name in error messages, if `url` is not given.
        timeout_s: Timeout of all other calls, in seconds. That of a step, and of a grader, is at least what the
            environment's own limits allow; see `envkit.types.deadline_s`.
        reset_timeout_s: Timeout of a reset, in seconds.
        grade_timeout_s: Timeout of a grader, in seconds.
        wait_timeout_s: Seconds to wait for a free slot before a lease raises `CapacityError`.
        token: Token for the server at `url`; default: the environment variable ``ENVKIT_TOKEN``.
        ca: PEM file with the certificates to trust for ``https://``, instead of those of the system.
        outages: Repeats leases, steps and graders during outages of the server; None: no call waits for it.

    Attributes:
        address: The server's address or name, as shown in error messages.
        capacity: Number of episode slots that this client may use on the server, as the server last reported it.
    """

    capacity = 0

    def __init__(
        self,
        url: str | None = None,
        *,
        token: str | None = None,
        ca: Path | str | None = None,
        connect: OpenSocket | None = None,
        name: str = "the server behind a socket",
        timeout_s: float = TIMEOUT_S,
        reset_timeout_s: float = SLOW_TIMEOUT_S,
        grade_timeout_s: float = SLOW_TIMEOUT_S,
        wait_timeout_s: float = math.inf,
        outages: Outages | None = None,
    ) -> None:
        if (url is None) == (connect is None):
            raise UsageError("pass either url or connect (exactly one of them)")
        times = {"timeout_s": timeout_s, "reset_timeout_s": reset_timeout_s, "grade_timeout_s": grade_timeout_s}
        for key, seconds in times.items():
            if seconds <= 0:
                raise UsageError(f"{key} must be above 0, got {seconds}")
        self.address = name if url is None else url.rstrip("/")
        self._timeout_s = timeout_s
        self._reset_timeout_s = reset_timeout_s
        self._grade_timeout_s = grade_timeout_s
        self._wait_timeout_s = wait_timeout_s
        if connect is None:
            token = token or os.environ.get(TOKEN_VARIABLE) or None
            connector = url_connector(self.address, timeout_s, token=token, ca=ca)
        else:
            # Send no token: the socket may lead into a sandbox, whose programs must not see the token.
            if token is not None or ca is not None:
                raise UsageError("token and ca need url; omit them if you pass connect")
            connector = socket_connector(connect, timeout_s)
        self._connection = SharedWebSocket(self.address, connector)
        self._outages = outages or Outages(0.0, print)
        self._rng = random.Random()
        self._queued = 0
        # Created in `__aenter__`, because they need a running event loop.
        self._resources: AsyncExitStack
        self._poll_locks: dict[str, anyio.Lock]
        self._released: anyio.Event

    @property
    def queued(self) -> int:
        """Number of leases that wait for a free slot, or for the server to be reachable."""
        return self._queued + self._outages.waiting_leases

    @asynccontextmanager
    async def lease(self, task: Task, *, id: str | None = None) -> AsyncIterator[Episode]:
        """Start an episode; wait while the server has no free slot. See `envkit.protocols.EnvHost.lease`.

        Entering the block already resets the environment on the server. If this reset fails, `Episode.reset` raises
        its error. Only the error for an unknown environment is raised on entering.

        Args:
            task: The task to play.
            id: Id of the session on the server; None for a new random id. If the server already has a session with
                this id and task, the episode continues that session.

        Raises:
            UnknownEnvError: No environment has the task's id.
            DeadlineError: The server did not answer within the client's timeouts.
            UnreachableError: The server is unreachable; with `outages`, for longer than their timeout.
        """
        id = uuid.uuid4().hex if id is None else id
        is_reachable = True
        try:
            yield await self._outages.call(partial(self._create, id, task), is_lease=True)
        except UnreachableError:
            is_reachable = False
            raise
        finally:
            if is_reachable:
                # This frees the slot. If it fails, the session expires later.
                with anyio.CancelScope(shield=True), suppress(EnvkitError):
                    await self._connection.call(table.DELETE, messages.SessionBody(id), _DELETE_TIMEOUT_S)
            released, self._released = self._released, anyio.Event()
            released.set()

    async def health(self) -> messages.HealthReply:
        """Check that the server answers, and return its version."""
        return await self._call(table.HEALTH, messages.NoBody())

    async def ready(self) -> messages.ReadyReply:
        """Return whether the server could start an episode now."""
        ready = await self._call(table.READY, messages.NoBody())
        self.capacity = ready.capacity if ready.limit is None else ready.limit
        return ready

    async def envs(self) -> list[messages.EnvReply]:
        """List the environments of the server."""
        return (await self._call(table.ENVS, messages.NoBody())).envs

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as resources:
            await resources.enter_async_context(self._connection.connected())
            self._poll_locks, self._released = {}, anyio.Event()
            await self.ready()
            self._resources = resources.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._resources.__aexit__(kind, error, trace)

    async def _create(self, id: str, task: Task) -> Episode:
        """Create a session as soon as the server has a free slot, and return its episode."""
        body = messages.CreateSessionBody(task.env_id, task.seed, dict(task.options), session_id=id)
        times = self._timeout_s, self._grade_timeout_s

        has_slots, delay_s, until = True, 0.0, clock.now() + self._wait_timeout_s
        # If other tasks already wait for a slot of this environment, wait behind them.
        lock = self._poll_locks.setdefault(task.env_id, anyio.Lock())
        if lock.locked():
            with anyio.move_on_after(until - clock.now()):
                has_slots = await self._wait_for_slot(lock, delay_s)
        while True:
            try:
                reply = await self._connection.call(table.CREATE, body, self._reset_timeout_s)
            except CapacityError:
                if not has_slots or clock.now() >= until:
                    raise
                with anyio.move_on_after(until - clock.now()):
                    has_slots = await self._wait_for_slot(lock, delay_s)
                # If the slots for this environment are in use while others are free, `ready` does not show it.
                delay_s = min(max(2 * delay_s, _POLL_DELAYS_S[0]), _POLL_DELAYS_S[1])
            except (OptionError, EnvError, SandboxError) as error:
                return SessionEpisode(id, error, 0, self._connection, self._outages, *times)
            else:
                return SessionEpisode(id, reply.reset(), reply.turn, self._connection, self._outages, *times)

    async def _wait_for_slot(self, lock: anyio.Lock, delay_s: float) -> bool:
        """Wait until the server has a free slot. Return False immediately if the server has no slots at all.

        Of the tasks that wait for an environment, only the one that holds `lock` polls, first after `delay_s`.
        """
        first_s, max_s = _POLL_DELAYS_S
        self._queued += 1
        try:
            async with lock:
                if delay_s:
                    await self._wait_for_release(delay_s)
                delay_s = first_s
                while not (await self.ready()).ready:
                    if not self.capacity:
                        return False
                    await self._wait_for_release(delay_s)
                    delay_s = min(2 * delay_s, max_s)
            return True
        finally:
            self._queued -= 1

    async def _wait_for_release(self, timeout_s: float) -> None:
        """Wait until this client has freed a slot, but at most `timeout_s` seconds."""
        with anyio.move_on_after(timeout_s * self._rng.uniform(0.5, 1.0)):  # jitter
            await self._released.wait()

    async def _call(self, operation: Operation[Q, R], request: Q) -> R:
        return await self._connection.call(operation, request, self._timeout_s)


@dataclass(eq=False)
class SessionEpisode(Episode):
    """An episode on a server. `_start` is the result of its reset, or the error that its reset raised."""

    _id: str
    _start: Reset | EnvkitError
    _turn: int
    _connection: SharedWebSocket
    _outages: Outages
    _timeout_s: float
    _grade_timeout_s: float
    _is_reset: bool = False

    @property
    def turn(self) -> int:
        return self._turn

    async def reset(self) -> Reset:
        start = self._start
        if isinstance(start, EnvkitError):
            raise start
        self._is_reset = True
        self._timeout_s = deadline_s(self._timeout_s, start.step_limit_s)
        self._grade_timeout_s = deadline_s(self._grade_timeout_s, start.grade_limit_s)
        return start

    async def step(self, action: str) -> Step:
        if not self._is_reset:
            raise StepOrderError("step before reset")
        return self._decode_step(await self._outages.call(lambda: self._request(self._turn, action)))

    async def repeat_step(self, action: str) -> Step:
        return self._decode_step(await self._request(self._turn - 1, action))

    async def grade(self) -> float | None:
        body, timeout_s = messages.SessionBody(self._id), self._grade_timeout_s
        return (await self._outages.call(lambda: self._connection.call(table.GRADE, body, timeout_s))).grade

    def start_step(self, action: str) -> Future[msgspec.Raw] | None:
        return self._request(self._turn, action) if self._is_reset else None

    def finish_step(self, answer: Future[msgspec.Raw]) -> Step:
        return self._decode_step(answer.result())

    def _request(self, turn: int, action: str) -> Future[msgspec.Raw]:
        # Replace lone surrogates, which JSON in UTF-8 cannot encode.
        encodable = action.encode(errors="replace").decode()
        if len(action) > _SHORT and len(msgspec.json.encode(encodable)) > messages.MAX_REQUEST_BYTES - _REST_BYTES:
            encodable = encodable[:_SHORT]  # like a completion at its token limit: a policy must not end the program
        body = messages.SessionStepBody(turn, encodable, session_id=self._id)
        return self._connection.start_call(table.STEP, body, self._timeout_s)

    def _decode_step(self, result: msgspec.Raw) -> Step:
        reply = self._connection.decode(table.STEP, result)
        step = reply.step()
        self._turn = reply.turn
        return step
