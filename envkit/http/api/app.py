"""The application: the native protocol over any `EnvHost`, as plain ASGI.

What is on a hot path is answered without a framework: a step, what runs in a sandbox, and the WebSocket. All else goes
to the described API.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress

import anyio
import msgspec

from envkit.errors import EnvkitError, UnreachableError
from envkit.http.api.operations import Operations, no_sandboxes
from envkit.http.api.websocket import Sockets
from envkit.http.auth.caller import caller_of
from envkit.http.auth.sandbox_policy import SandboxPolicy
from envkit.http.limits.memory_budget import bodies_of
from envkit.http.protocol import messages
from envkit.http.protocol.asgi import ASGIApp, Receive, Scope, Send, read_body, replay, respond, respond_problem
from envkit.http.sandboxes.http import SandboxPaths
from envkit.http.sandboxes.lookup import MAX_TIMEOUT_S
from envkit.http.sandboxes.operations import SandboxOperations
from envkit.http.sandboxes.snapshot_quota import SnapshotBounds
from envkit.http.sandboxes.transfers import FolderTransfers, FolderTransport
from envkit.http.sessions.counters import played_of
from envkit.http.sessions.metrics import Collect
from envkit.http.sessions.table import STEP_TIMEOUT_S, TTL_S, SessionTable
from envkit.protocols import EnvHost, SandboxPool
from envkit.registry import EnvSpec

SLOW_RESET_S = 5.0
"""Seconds after which a reset, or the start of a sandbox, that goes on is answered with 202."""

_CUT_S = 2.0
"""Seconds in which calls that are cut at shutdown have to end."""

_STEP = msgspec.json.Decoder(messages.StepBody)
_BEFORE_ID = f"/v{messages.PROTOCOL}/sessions/"
_AFTER_ID = "/step"
_STEPS = f"/v{messages.PROTOCOL}/sessions:step"
_SANDBOXES = f"/v{messages.PROTOCOL}/sandboxes"
_SNAPSHOTS = f"/v{messages.PROTOCOL}/snapshots"
_EVENTS = f"/v{messages.PROTOCOL}/events"


def create_app(
    host: EnvHost,
    *,
    envs: Callable[[], Iterable[EnvSpec]] = tuple,
    ttl_s: float = TTL_S,
    step_timeout_s: float = STEP_TIMEOUT_S,
    tenant_share: float = 1.0,
    slow_reset_s: float = SLOW_RESET_S,
    max_request_bytes: int = messages.MAX_REQUEST_BYTES,
    lazy: bool = False,
    pool: SandboxPool | None = None,
    trees: FolderTransport | None = None,
    max_timeout_s: float = MAX_TIMEOUT_S,
    sandbox_ttl_s: float | None = None,
    metrics: Collect | None = None,
    permits: SandboxPolicy | None = None,
    snapshots: SnapshotBounds | None = None,
    sends_traces: bool = False,
) -> App:
    """Return the application that serves `host` and `pool`, which the caller has entered and leaves afterwards.

    Args:
        host: Where episodes are played.
        envs: Gives what ``GET /v1/envs`` lists; asked anew each time.
        ttl_s: Seconds without a call after which a session expires.
        step_timeout_s: Seconds after which a step is cancelled and its session is broken.
        tenant_share: Share of the places for episodes that one tenant may have.
        slow_reset_s: Seconds after which a reset, or the start of a sandbox, that goes on is answered with 202 over
            HTTP.
        max_request_bytes: Size above which a body, or one frame of a socket, is refused; what goes into a sandbox has
            bounds of its own.
        lazy: Prepare the described API when it is first asked for, instead of at start.
        pool: Lends the sandboxes that callers may use; None where there are none.
        trees: Packs and unpacks the folders that go into sandboxes and out of them
            (`envkit.sandbox.transfer.tar_stream`); None: this server does neither.
        max_timeout_s: The longest that a command in a sandbox may ask for, seconds.
        sandbox_ttl_s: Seconds without use after which a sandbox is stopped, where its caller does not ask for less.
        metrics: Gives what ``GET /metrics`` tells beside the sessions.
        permits: What callers may have their sandboxes be.
        snapshots: How many snapshots of them there may be.
        sends_traces: Send callers the tracebacks of environments, for the server inside an environment's sandbox.
    """
    sessions = SessionTable(host, ttl_s=ttl_s, step_timeout_s=step_timeout_s, tenant_share=tenant_share)
    calls = Operations(sessions, envs, metrics=metrics)
    calls.sends_traces = sends_traces
    if pool is not None:
        calls.sandboxes = SandboxOperations(
            pool,
            calls.problem,
            max_timeout_s=max_timeout_s,
            ttl_s=sandbox_ttl_s,
            permits=permits,
            snapshots=snapshots,
        )
    folders = None if trees is None else FolderTransfers(trees)
    return App(calls, folders, slow_reset_s=slow_reset_s, max_request_bytes=max_request_bytes, lazy=lazy)


class App:
    """The ASGI application; see `create_app`. Its sessions live from the lifespan's startup to its shutdown."""

    def __init__(
        self,
        calls: Operations,
        folders: FolderTransfers | None,
        *,
        slow_reset_s: float,
        max_request_bytes: int,
        lazy: bool,
    ) -> None:
        self._calls = calls
        self._sandboxes = None if calls.sandboxes is None else SandboxPaths(calls.sandboxes, folders)
        self._slow_reset_s = slow_reset_s
        self._max_request_bytes = max_request_bytes
        self._lazy = lazy
        self._described: ASGIApp | None = None
        self._sockets: Sockets | None = None
        self._exchanges: set[asyncio.Task[object]] = set()
        """Requests that are being answered, but for streams of events, which end by themselves."""
        self._is_cutting = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path: str = scope["path"]
            if path == _EVENTS:
                await self._sandbox(scope, receive, send)
                return
            task = asyncio.current_task()
            assert task is not None
            self._exchanges.add(task)
            try:
                is_plain = scope["method"] == "POST" and not scope.get("query_string")
                if is_plain and path.startswith(_BEFORE_ID) and path.endswith(_AFTER_ID):
                    await self._step(path[len(_BEFORE_ID) : -len(_AFTER_ID)], scope, receive, send)
                elif is_plain and path == _STEPS:
                    await self._steps(scope, receive, send)
                elif path.startswith((_SANDBOXES, _SNAPSHOTS)):
                    await self._sandbox(scope, receive, send)
                else:
                    await self._any(scope, receive, send)
            except asyncio.CancelledError:
                if not self._is_cutting:
                    raise
                task.uncancel()
                await self._say_cut(send)
            finally:
                self._exchanges.discard(task)
        elif scope["type"] == "websocket":
            await self._socket(scope, receive, send)
        else:
            await self._live(receive, send)

    @property
    def errors(self) -> Counter[str]:
        """Errors that were answered, by code; `envkit.http.server.middleware.Guard` adds its own."""
        return self._calls.sessions.tally.errors

    async def drain(self, timeout_s: float) -> None:
        """Begin nothing new, and wait until what was asked is answered.

        Requests that are not answered by then are cut, and told so; one whose answer has begun is broken off.
        """
        self._calls.sessions.is_closing = True
        if self._calls.sandboxes is not None:
            self._calls.sandboxes.access.closing.set()
        with anyio.move_on_after(timeout_s):
            if self._sockets is not None:
                await self._sockets.answered()
            while self._exchanges:
                await asyncio.wait(self._exchanges)
        self._is_cutting = True
        for task in self._exchanges:
            task.cancel()
        if self._exchanges:
            await asyncio.wait(self._exchanges, timeout=_CUT_S)

    async def _say_cut(self, send: Send) -> None:
        error = UnreachableError("the server is shutting down, and the call was cut")
        with suppress(OSError, RuntimeError):  # the answer has begun, or there is nobody
            await respond_problem(send, self._calls.problem(error))

    async def _step(self, id: str, scope: Scope, receive: Receive, send: Send) -> None:
        calls = self._calls.by(caller_of(scope))
        try:
            step = messages.read(await read_body(scope, receive, self._max_request_bytes), _STEP)
            answer = calls.encode(await calls.step(id, step), id)
        except Exception as error:
            await respond_problem(send, calls.problem(error, id))
        else:
            await respond(send, answer)

    async def _steps(self, scope: Scope, receive: Receive, send: Send) -> None:
        calls = self._calls.by(caller_of(scope))
        try:
            answer = await calls.steps(await read_body(scope, receive, self._max_request_bytes), played_of(scope))
        except Exception as error:
            await respond_problem(send, calls.problem(error))
        else:
            await respond(send, answer)

    async def _sandbox(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._sandboxes is None:
            await respond_problem(send, self._calls.problem(no_sandboxes()))
        elif not await self._sandboxes.answer_hot(scope, receive, send):
            await self._describe()(scope, receive, send)

    async def _any(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await read_body(scope, receive, self._max_request_bytes)
        except EnvkitError as error:
            await respond_problem(send, self._calls.problem(error))
        else:
            await self._describe()(scope, replay(body, receive), send)

    async def _socket(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._sockets is None or scope["path"] != messages.SOCKET_PATH:
            await receive()
            await send({"type": "websocket.close"})
        else:
            link = scope["state"].get("link")
            await self._sockets.serve(caller_of(scope), receive, send, bodies_of(scope), link, played_of(scope))

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        if not self._lazy:
            self._describe()
        async with self._calls.sessions, anyio.create_task_group() as tasks:
            self._sockets = Sockets(self._calls, tasks, self._max_request_bytes)
            if self._calls.sandboxes is not None:
                self._calls.sandboxes.live(tasks)
            await send({"type": "lifespan.startup.complete"})
            await receive()
            tasks.cancel_scope.cancel()
        await send({"type": "lifespan.shutdown.complete"})

    def _describe(self) -> ASGIApp:
        if self._described is None:
            from envkit.http.api.openapi import describe

            self._described = describe(self._calls, self._slow_reset_s, self._sandboxes)
        return self._described
