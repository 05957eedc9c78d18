"""The ASGI application of the server: makes an `EnvHost` and a sandbox pool available over HTTP and WebSocket.

Frequent requests (steps, commands in sandboxes, the WebSocket) are answered without a web framework, which would slow
them down. `envkit.http.api.openapi` answers all other requests with FastAPI.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import anyio
import msgspec

from envkit.errors import EnvkitError, UnreachableError
from envkit.http.api.operations import Operations, no_sandboxes
from envkit.http.api.websocket import Sockets
from envkit.http.auth.caller import caller_of
from envkit.http.auth.sandbox_policy import SandboxPolicy
from envkit.http.protocol import messages
from envkit.http.protocol.asgi import ASGIApp, Receive, Scope, Send, read_body, replay, respond, respond_problem
from envkit.http.sandboxes.http import SandboxPaths
from envkit.http.sandboxes.lookup import MAX_TIMEOUT_S
from envkit.http.sandboxes.operations import SandboxOperations
from envkit.http.sandboxes.snapshot_quota import SnapshotBounds
from envkit.http.sandboxes.streams import STREAM_PATHS, SandboxStreams
from envkit.http.sandboxes.transfers import FolderTransfers, FolderTransport
from envkit.http.sessions.counters import step_metrics_of
from envkit.http.sessions.metrics import Collect
from envkit.http.sessions.table import STEP_TIMEOUT_S, TTL_S, SessionTable
from envkit.protocols import EnvHost, SandboxPool
from envkit.registry import EnvSpec

SLOW_RESET_S = 5.0
"""Seconds after which a running reset, or start of a sandbox, is answered with 202."""

_CANCEL_S = 2.0
"""Seconds that shutdown waits for cancelled calls to end."""

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
    folder_transport: FolderTransport | None = None,
    max_timeout_s: float = MAX_TIMEOUT_S,
    sandbox_ttl_s: float | None = None,
    metrics: Collect | None = None,
    policy: SandboxPolicy | None = None,
    snapshots: SnapshotBounds | None = None,
    sends_traces: bool = False,
) -> App:
    """Return the ASGI application that serves the environments of `host` and the sandboxes of `pool`.

    The application neither opens nor closes `host` and `pool`; the caller does.

    Args:
        host: Plays the episodes.
        envs: Returns the environments that ``GET /v1/envs`` lists; called for each such request.
        ttl_s: Seconds without a call after which a session expires.
        step_timeout_s: Seconds after which a step is cancelled and its session breaks.
        tenant_share: Maximum fraction of the episode slots that one tenant may use.
        slow_reset_s: Seconds after which the server answers an HTTP request with 202 if its reset, or its start of a
            sandbox, is still running.
        max_request_bytes: Maximum size of a request body or WebSocket frame, in bytes. File transfers to sandboxes have
            their own limits.
        lazy: Whether to build the OpenAPI routes on first use instead of at startup.
        pool: Lends sandboxes to callers; None: the server lends no sandboxes.
        folder_transport: Packs and unpacks folders (`envkit.sandbox.transfer.tar_stream`); None: no folder transfers.
        max_timeout_s: Maximum timeout of a command in a sandbox, in seconds.
        sandbox_ttl_s: Seconds without use after which a sandbox is stopped. Its caller can request a shorter time.
        metrics: Returns metrics that ``GET /metrics`` shows in addition to the metrics of sessions.
        policy: Which sandboxes callers may request.
        snapshots: Limits on the number and size of snapshots.
        sends_traces: Whether errors of environments contain the traceback. Only the server inside an environment's
            sandbox sets this.
    """
    sessions = SessionTable(host, ttl_s=ttl_s, step_timeout_s=step_timeout_s, tenant_share=tenant_share)
    operations = Operations(sessions, envs, metrics=metrics)
    operations.sends_traces = sends_traces
    if pool is not None:
        operations.sandboxes = SandboxOperations(
            pool,
            operations.problem,
            max_timeout_s=max_timeout_s,
            ttl_s=sandbox_ttl_s,
            policy=policy,
            snapshots=snapshots,
        )
    folders = None if folder_transport is None else FolderTransfers(folder_transport)
    return App(operations, folders, slow_reset_s=slow_reset_s, max_request_bytes=max_request_bytes, lazy=lazy)


class App:
    """The ASGI application that `create_app` returns. It serves sessions for the duration of the ASGI lifespan."""

    def __init__(
        self,
        operations: Operations,
        folders: FolderTransfers | None,
        *,
        slow_reset_s: float,
        max_request_bytes: int,
        lazy: bool,
    ) -> None:
        self._operations = operations
        self._sandboxes = None if operations.sandboxes is None else SandboxPaths(operations.sandboxes, folders)
        self._streams = None if operations.sandboxes is None else SandboxStreams(operations.sandboxes.access)
        self._slow_reset_s = slow_reset_s
        self._max_request_bytes = max_request_bytes
        self._lazy = lazy
        self._api: ASGIApp | None = None
        self._sockets: Sockets | None = None
        self._requests: set[asyncio.Task[object]] = set()
        """Running requests, except event streams, which end by themselves."""
        self._is_cancelling = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path: str = scope["path"]
            if path == _EVENTS:
                await self._sandbox(scope, receive, send)
                return
            task = asyncio.current_task()
            assert task is not None
            self._requests.add(task)
            try:
                is_plain = scope["method"] == "POST" and not scope.get("query_string")
                if is_plain and path.startswith(_BEFORE_ID) and path.endswith(_AFTER_ID):
                    await self._step(path[len(_BEFORE_ID) : -len(_AFTER_ID)], scope, receive, send)
                elif is_plain and path == _STEPS:
                    await self._steps(scope, receive, send)
                elif path.startswith((_SANDBOXES, _SNAPSHOTS)):
                    await self._sandbox(scope, receive, send)
                else:
                    await self._other(scope, receive, send)
            except asyncio.CancelledError:
                if not self._is_cancelling:
                    raise
                task.uncancel()
                await self._respond_cancelled(send)
            finally:
                self._requests.discard(task)
        elif scope["type"] == "websocket":
            await self._websocket(scope, receive, send)
        else:
            await self._lifespan(receive, send)

    @property
    def errors(self) -> Counter[str]:
        """Number of answers with each error code, including errors that `AuthMiddleware` answered."""
        return self._operations.sessions.counters.errors

    def document(self) -> dict[str, Any]:
        """Return the OpenAPI document."""
        api: Any = self._openapi()
        document: dict[str, Any] = api.openapi()
        return document

    def methods(self) -> dict[str, type]:
        """Return the methods of the WebSocket with the types of their parameters."""
        return self._operations.methods()

    async def drain(self, timeout_s: float) -> None:
        """Refuse new calls, and wait up to `timeout_s` seconds until all running calls have ended.

        Then cancel the calls that still run. Their callers get an error, or an incomplete reply if the reply had
        already begun.
        """
        self._operations.sessions.is_closing = True
        if self._operations.sandboxes is not None:
            self._operations.sandboxes.access.closing.set()
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

    async def _respond_cancelled(self, send: Send) -> None:
        error = UnreachableError("the call was cancelled because the server is shutting down; retry later")
        # Sending fails if the response has already started or the client has disconnected.
        with suppress(OSError, RuntimeError):
            await respond_problem(send, self._operations.problem(error))

    async def _step(self, id: str, scope: Scope, receive: Receive, send: Send) -> None:
        operations = self._operations.by(caller_of(scope))
        try:
            step = messages.read(await read_body(scope, receive, self._max_request_bytes), _STEP)
            answer = operations.encode(await operations.step(id, step), id)
        except Exception as error:
            await respond_problem(send, operations.problem(error, id))
        else:
            await respond(send, answer)

    async def _steps(self, scope: Scope, receive: Receive, send: Send) -> None:
        operations = self._operations.by(caller_of(scope))
        try:
            answer = await operations.steps(
                await read_body(scope, receive, self._max_request_bytes), step_metrics_of(scope)
            )
        except Exception as error:
            await respond_problem(send, operations.problem(error))
        else:
            await respond(send, answer)

    async def _sandbox(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._sandboxes is None:
            await respond_problem(send, self._operations.problem(no_sandboxes()))
        elif not await self._sandboxes.answer_hot(scope, receive, send):
            await self._openapi()(scope, receive, send)

    async def _other(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await read_body(scope, receive, self._max_request_bytes)
        except EnvkitError as error:
            await respond_problem(send, self._operations.problem(error))
        else:
            await self._openapi()(scope, replay(body, receive), send)

    async def _websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._streams is not None and STREAM_PATHS.fullmatch(scope["path"]):
            await self._streams.serve(scope, receive, send)
        elif self._sockets is None or scope["path"] != messages.SOCKET_PATH:
            await receive()
            await send({"type": "websocket.close"})
        else:
            await self._sockets.serve(caller_of(scope), receive, send, step_metrics_of(scope))

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        if not self._lazy:
            self._openapi()
        async with self._operations.sessions, anyio.create_task_group() as tasks:
            self._sockets = Sockets(self._operations, tasks, self._max_request_bytes)
            if self._operations.sandboxes is not None:
                self._operations.sandboxes.run_in(tasks)
            await send({"type": "lifespan.startup.complete"})
            await receive()
            tasks.cancel_scope.cancel()
        await send({"type": "lifespan.shutdown.complete"})

    def _openapi(self) -> ASGIApp:
        if self._api is None:
            from envkit.http.api.openapi import describe

            self._api = describe(self._operations, self._slow_reset_s, self._sandboxes)
        return self._api
