"""The ASGI application of the server: makes an `EnvHost` and a sandbox pool available over HTTP and WebSocket.

Frequent requests (steps, commands in sandboxes, the WebSocket) are answered without a web framework, which would slow
them down. `envkit.http.api.openapi` answers all other requests with FastAPI.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import anyio
import msgspec

from envkit.errors import EnvkitError, UnknownPathError, UnreachableError
from envkit.http.api.dispatcher import Dispatcher
from envkit.http.api.session_operations import SessionOperations
from envkit.http.api.websocket import Sockets
from envkit.http.auth.caller import caller_of
from envkit.http.auth.sandbox_policy import SandboxPolicy
from envkit.http.protocol import messages
from envkit.http.protocol.asgi import CallOutcome, Receive, Scope, Send, read_body, respond_outcome
from envkit.http.protocol.operations import CONNECT, EXEC, PROGRAM, STEP, STEPS
from envkit.http.sandboxes.access import SandboxAccess
from envkit.http.sandboxes.byte_relay import taker
from envkit.http.sandboxes.lifecycle import SandboxLifecycle
from envkit.http.sandboxes.streams import SandboxStreams
from envkit.http.sandboxes.transfers import FileTransfers, FolderTransport
from envkit.http.sessions.metrics import Collect
from envkit.http.sessions.table import GRADE_TIMEOUT_S, RESET_TIMEOUT_S, STEP_TIMEOUT_S, TTL_S, SessionTable
from envkit.protocols import EnvHost, SandboxPool
from envkit.registry import EnvSpec
from envkit.types import SandboxState, Task

if TYPE_CHECKING:
    from fastapi import FastAPI

    from envkit.http.api.model_routes import ModelRoutes

SLOW_RESET_S = 5.0
"""Default of the argument `slow_reset_s` of `create_app`."""

_CANCEL_S = 2.0
"""Maximum seconds that the shutdown waits until the calls that it cancelled have ended."""

_IN_USE = frozenset({SandboxState.STARTING, SandboxState.LEASED, SandboxState.SUSPECT})

_STEP = msgspec.json.Decoder(messages.StepBody)
_SESSION, _AFTER_ID = STEP.path.split("{session_id}")
_SANDBOX, _AFTER_SANDBOX = EXEC.path.split("{sandbox_id}")
_CONNECT = CONNECT.path.partition("{sandbox_id}")[2]


def create_app(
    host: EnvHost,
    *,
    envs: Callable[[], Iterable[EnvSpec]] = tuple,
    check_task: Callable[[Task], None] | None = None,
    ttl_s: float = TTL_S,
    step_timeout_s: float = STEP_TIMEOUT_S,
    reset_timeout_s: float = RESET_TIMEOUT_S,
    grade_timeout_s: float = GRADE_TIMEOUT_S,
    tenant_share: float = 1.0,
    slow_reset_s: float = SLOW_RESET_S,
    max_request_bytes: int = messages.MAX_REQUEST_BYTES,
    lazy: bool = False,
    pool: SandboxPool | None = None,
    folder_transport: FolderTransport | None = None,
    sandbox_ttl_s: float | None = None,
    metrics: Collect | None = None,
    policy: SandboxPolicy | None = None,
    sends_traces: bool = False,
    model: ModelRoutes | None = None,
    handlers: Sequence[object] = (),
) -> App:
    """Return the ASGI application that serves the environments of `host` and the sandboxes of `pool`.

    The application neither opens nor closes `host` and `pool`; the caller does.

    Args:
        host: Plays the episodes of the sessions.
        envs: Returns the environments that ``GET /v1/envs`` lists. The server calls it for each such request.
        check_task: Raises an error for a task that clients may not play; None allows all tasks.
        ttl_s: Seconds without a call after which a session expires.
        step_timeout_s: Timeout of a step, in seconds. A step that exceeds it is cancelled, and its session breaks.
        reset_timeout_s: Timeout of a reset, in seconds.
        grade_timeout_s: Timeout of the grader of an episode, in seconds.
        tenant_share: Maximum fraction of the episode slots, and of those of each part of the host, that one tenant may
            use; one slot is always allowed.
        slow_reset_s: Seconds after which an HTTP request that creates a session or a sandbox, or grades an episode,
            gets an answer with status 202, if the reset, the start or the grader is still running.
        max_request_bytes: Maximum size of a request body or WebSocket frame, in bytes. File transfers to sandboxes have
            their own limits.
        lazy: Whether to build the routes of FastAPI on first use instead of at startup.
        pool: Pool of the sandboxes that callers can lease. If it is None, the server lends no sandboxes.
        folder_transport: Packs and unpacks folders, for example `envkit.sandbox.transfer.tar_stream`. If it is None,
            callers can neither upload nor download folders.
        sandbox_ttl_s: Maximum seconds without use after which the server stops a sandbox; None for no maximum.
        metrics: Returns metrics that ``GET /metrics`` shows in addition to the metrics of sessions.
        policy: Which sandboxes callers may request; None for the defaults of `SandboxPolicy`.
        sends_traces: Whether callers get the traceback of an environment's error; for servers inside sandboxes.
        model: Routes of the server's language model; None if it has none.
        handlers: Objects whose methods handle further operations; see `envkit.http.protocol.asgi.handles`.
    """
    sessions = SessionTable(
        host,
        ttl_s=ttl_s,
        step_timeout_s=step_timeout_s,
        reset_timeout_s=reset_timeout_s,
        grade_timeout_s=grade_timeout_s,
        tenant_share=tenant_share,
    )
    operations = SessionOperations(
        sessions,
        envs,
        metrics,
        check_task=check_task,
        max_request_bytes=max_request_bytes,
        sends_traces=sends_traces,
        pool=pool,
    )
    dispatcher = Dispatcher(operations, slow_s=slow_reset_s, max_request_bytes=max_request_bytes)
    for handler in handlers:
        dispatcher.bind(handler)
    sandboxes = None
    if pool is not None:
        dispatcher.sandboxes = access = SandboxAccess(pool)
        sandboxes = SandboxLifecycle(access, dispatcher.keyed, ttl_s=sandbox_ttl_s, policy=policy)
        for owner in (access, sandboxes, FileTransfers(access, dispatcher.outcome, folder_transport)):
            dispatcher.bind(owner)
    return App(dispatcher, sandboxes, model, max_request_bytes=max_request_bytes, lazy=lazy)


class App:
    """The ASGI application that `create_app` returns. When its ASGI lifespan ends, all its sessions end."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        sandboxes: SandboxLifecycle | None,
        model: ModelRoutes | None = None,
        *,
        max_request_bytes: int,
        lazy: bool,
    ) -> None:
        self._dispatcher = dispatcher
        self._model = model
        self._operations = dispatcher.operations
        self._sandboxes = sandboxes
        self._streams = None if sandboxes is None else SandboxStreams(sandboxes.access, self._operations.failure)
        self._max_request_bytes = max_request_bytes
        self._lazy = lazy
        self._api: FastAPI | None = None
        self._sockets: Sockets | None = None
        self._requests: set[asyncio.Task[object]] = set()
        """Running HTTP requests."""
        self._is_cancelling = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path: str = scope["path"]
            task = asyncio.current_task()
            assert task is not None
            self._requests.add(task)
            try:
                await self._respond(path, scope, receive, send)
            except asyncio.CancelledError:
                if not self._is_cancelling:
                    raise
                task.uncancel()
                error = UnreachableError("the call was cancelled because the server is shutting down; retry later")
                # Sending fails if the response has already started or the client has disconnected.
                with suppress(OSError, RuntimeError):
                    await respond_outcome(send, self._operations.failure(error))
            finally:
                self._requests.discard(task)
        elif scope["type"] == "websocket":
            await self._websocket(scope, receive, send)
        else:
            await self._lifespan(receive, send)

    @property
    def errors(self) -> Counter[str]:
        """Number of error answers for each error code, including those that `AuthMiddleware` sent."""
        return self._operations.sessions.counters.errors

    def api(self) -> FastAPI:
        """Return the FastAPI application with the routes of all operations. The first call builds it."""
        if self._api is None:
            from envkit.http.api.openapi import describe

            self._api = describe(self._dispatcher)
        return self._api

    def refuse_new(self) -> None:
        """Refuse new sessions and sandboxes from now on; calls to those that exist still work."""
        self._operations.sessions.is_draining = True
        if self._sandboxes is not None:
            self._sandboxes.starts.is_draining = True

    def in_use(self, *, with_sandboxes: bool) -> int:
        """Return the number of episodes that run, and, `with_sandboxes`, of sandboxes that clients use."""
        running = self._operations.sessions.leased
        if with_sandboxes and self._sandboxes is not None:
            views = self._sandboxes.access.pool.views(tenant=None)
            running += sum(view.state in _IN_USE and not view.key.is_own for view in views)
        return running

    async def drain(self, timeout_s: float) -> None:
        """Refuse new calls, and wait up to `timeout_s` seconds until all running calls have ended.

        HTTP calls that run longer are cancelled: the caller gets an error, or an incomplete reply if a part of the
        reply was already sent.
        """
        self._operations.sessions.is_closing = True
        if self._sandboxes is not None:
            self._sandboxes.access.closing.set()
        with anyio.move_on_after(timeout_s):
            if self._sockets is not None:
                await self._sockets.answered()
            while self._requests:
                await asyncio.wait(self._requests)
        self._is_cancelling = True
        for task in self._requests:
            task.cancel()
        if self._requests:
            await asyncio.wait(self._requests, timeout=_CANCEL_S)

    async def _respond(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer an HTTP request: the most frequent operations directly, and the others through FastAPI."""
        if scope["method"] == "POST":
            if path.startswith(_SESSION) and path.endswith(_AFTER_ID) and not scope.get("query_string"):
                await self._step(path[len(_SESSION) : -len(_AFTER_ID)], scope, receive, send)
                return
            if path == STEPS.path:
                await self._dispatcher.respond(STEPS, {}, scope, receive, send)
                return
            if path.startswith(_SANDBOX) and path.endswith(_AFTER_SANDBOX):
                values = {"sandbox_id": path[len(_SANDBOX) : -len(_AFTER_SANDBOX)]}
                await self._dispatcher.respond(EXEC, values, scope, receive, send)
                return
        if path.endswith(_CONNECT) and self._streams is not None and (take := taker(scope)) is not None:
            await self._streams.serve_bytes(path[len(_SANDBOX) : -len(_CONNECT)], take, scope, send)
            return
        if path in messages.MODEL_PATHS:
            await self._call_model(scope, receive, send)
            return
        await self.api()(scope, receive, send)

    async def _call_model(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if self._model is None:
                raise UnknownPathError("this server has no language model; start it with --model")
            await self._model(scope, receive, send)
        except EnvkitError as error:
            await respond_outcome(send, self._operations.failure(error).of_model())

    async def _step(self, id: str, scope: Scope, receive: Receive, send: Send) -> None:
        caller = caller_of(scope)
        try:
            step = messages.read(await read_body(scope, receive, self._max_request_bytes), _STEP)
            body = messages.SessionStepBody(step.turn, step.action, session_id=id)
            outcome = CallOutcome(messages.write(await self._operations.step(body, caller)))
        except Exception as error:
            outcome = self._operations.failure(error, caller, id)
        await respond_outcome(send, outcome)

    async def _websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        if self._sockets is not None and path == messages.SOCKET_PATH:
            await self._sockets.serve(caller_of(scope), receive, send)
            return
        id, _, _ = path.removeprefix(_SANDBOX).partition("/")
        for operation in (PROGRAM, CONNECT):
            if self._streams is not None and path == operation.path.replace("{sandbox_id}", id):
                await self._streams.serve(operation, id, scope, receive, send)
                return
        await receive()
        await send({"type": "websocket.close"})

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        if not self._lazy:
            self.api()
        async with self._operations.sessions, anyio.create_task_group() as tasks:
            self._sockets = Sockets(self._dispatcher, tasks, self._max_request_bytes, self._sandboxes)
            self._dispatcher.keyed.tasks = tasks
            if self._sandboxes is not None:
                self._sandboxes.starts.tasks = tasks
            await send({"type": "lifespan.startup.complete"})
            await receive()
            tasks.cancel_scope.cancel()
        await send({"type": "lifespan.shutdown.complete"})
