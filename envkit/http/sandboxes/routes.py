"""The HTTP routes for sandboxes, which are part of the OpenAPI application in `envkit.http.api.openapi`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import anyio
import msgspec
from fastapi import Request, Response

from envkit.errors import RequestError, SandboxConflictError
from envkit.http.auth.caller import caller_of
from envkit.http.limits.memory_budget import reservation_of
from envkit.http.protocol import sandbox_messages as wire
from envkit.http.protocol.asgi import RETRY_AFTER_S, ASGIApp, Receive, Scope, Send, read_body
from envkit.http.protocol.messages import (
    MAX_REQUEST_BYTES,
    PROTOCOL,
    DoneReply,
    NoBody,
    Problem,
    read,
    read_each,
    write,
)
from envkit.http.sandboxes.http import MAX_EXEC_BYTES, SandboxPaths, file_user_of, key_of, number_of, path_of, user_of
from envkit.http.sandboxes.idempotency import CallOutcome
from envkit.http.sandboxes.transfers import MAX_FILE_BYTES, TAR
from envkit.http.sandboxes.work import bytes_to_reserve
from envkit.types import SandboxState

_SANDBOXES = f"/v{PROTOCOL}/sandboxes"
_SANDBOX = f"{_SANDBOXES}/{{sandbox_id}}"
_CREATE = msgspec.json.Decoder(wire.CreateSandboxBody)
_EXEC = msgspec.json.Decoder(wire.ExecFrame)
_EXECS = msgspec.json.Decoder(list[wire.ExecFrame])
_MAX_OUTPUT_BYTES = 256 << 20
"""Limit on the sum of the output limits in one list, standard output and standard error each."""

_MAX_EXECS = 1000
_NO_MODE = -1
_BYTES = "application/octet-stream"


class ExecOutcome(msgspec.Struct, frozen=True):
    """The outcome of one program in a list: either `result` or `error`; the other field is omitted."""

    result: wire.ExecReply | None = None
    error: Problem | None = None


TYPES: Sequence[Any] = (
    wire.CreateSandboxBody,
    wire.ExecBody,
    wire.ShellBody,
    list[wire.ExecFrame],
    wire.SandboxReply,
    wire.StartingReply,
    wire.SandboxesReply,
    wire.ExecReply,
    list[ExecOutcome],
    wire.LogReply,
    wire.StatsReply,
    wire.SnapshotReply,
    wire.SnapshotsReply,
    wire.EventReply,
)


class Add(Protocol):
    """Function that adds a route to the OpenAPI application."""

    def __call__(
        self,
        verb: str,
        path: str,
        route: Any,
        reply: Any = None,
        body: Any = None,
        opening: Any = None,
        more: dict[str, Any] | None = None,
        content_type: str | None = None,
    ) -> None: ...


def add_routes(add: Add, paths: SandboxPaths, slow_start_s: float) -> None:
    """Add the sandbox routes.

    Args:
        add: Function that adds a route to the application.
        paths: Answers requests about sandboxes.
        slow_start_s: Seconds after which a request to start a sandbox is answered with 202 if the start is still in
            progress.
    """
    routes = _SandboxRoutes(paths, slow_start_s)
    key = _header("Idempotency-Key", "Makes the call safe to repeat: the same key and body return the same answer.")
    path = _query("path", "Path of the file or folder in the sandbox.", {"type": "string"}, required=True)
    size = _query("max_bytes", "Maximum size in bytes; a larger file or folder is rejected.", {"type": "integer"})
    mode = _query("mode", "Octal permissions, such as 755.", {"type": "string", "pattern": "^[0-7]{1,4}$"})
    user = _query("user", "User of the shell.", {"enum": ["agent", "grader", "root"]})
    owner = _query("user", "User who reads or writes the file.", {"enum": ["agent", "grader"]})
    after = _query("after", "Number of the last event received.", {"type": "integer"})
    add("PUT", _SANDBOX, routes.create, wire.SandboxReply, wire.CreateSandboxBody, wire.StartingReply)
    add("GET", _SANDBOXES, routes.views, wire.SandboxesReply)
    add("GET", _SANDBOX, routes.view, wire.SandboxReply)
    add("DELETE", _SANDBOX, routes.stop, DoneReply)
    add("GET", f"{_SANDBOX}/logs", routes.log, wire.LogReply)
    add("GET", f"{_SANDBOX}/stats", routes.stats, wire.StatsReply)
    add("POST", f"{_SANDBOX}/exec", routes.exec, wire.ExecReply, wire.ExecBody, more=_more(key))
    add("POST", f"{_SANDBOXES}:exec", routes.execs, list[ExecOutcome], list[wire.ExecFrame])
    add("POST", f"{_SANDBOX}/shells/{{name}}", routes.shell, wire.ExecReply, wire.ShellBody, more=_more(key))
    add("DELETE", f"{_SANDBOX}/shells/{{name}}", routes.close_shell, DoneReply, more=_more(user))
    add("GET", f"{_SANDBOX}/files", routes.read, more=_more(path, size, owner), content_type=_BYTES)
    add("PUT", f"{_SANDBOX}/files", routes.write, DoneReply, more=_more(path, mode, owner, key, takes=_BYTES))
    add("GET", f"{_SANDBOX}/tree", routes.download_tree, more=_more(path, size, owner), content_type=TAR.decode())
    add("PUT", f"{_SANDBOX}/tree", routes.upload_tree, DoneReply, more=_more(path, owner, takes=TAR.decode()))
    add("POST", f"{_SANDBOX}/snapshot", routes.snapshot, wire.SnapshotReply, more=_more(key))
    add("GET", f"/v{PROTOCOL}/snapshots", routes.snapshots, wire.SnapshotsReply)
    add("DELETE", f"/v{PROTOCOL}/snapshots/{{snapshot}}", routes.remove_snapshot, DoneReply)
    add("GET", f"/v{PROTOCOL}/events", routes.events, more=_more(after), content_type="text/event-stream")


class _SandboxRoutes:
    """The routes of sandboxes. Each method decodes the request, calls one operation, and encodes the reply."""

    def __init__(self, paths: SandboxPaths, slow_start_s: float) -> None:
        self._paths = paths
        self._calls = paths.calls
        self._slow_start_s = slow_start_s

    async def create(self, sandbox_id: str, request: Request) -> Response:
        """Start a sandbox from a spec and return its state. The call is safe to repeat.

        If `snapshot` is set, the sandbox contains the files of that snapshot at its start. Status 202 means that the
        start is still in progress: repeat the call until it returns the sandbox. Status 409 means that the id belongs
        to a sandbox with another spec, or to a sandbox that has ended. The id of an ended sandbox can be used again
        after a `DELETE`, or ten minutes after the end.
        """
        caller = caller_of(request.scope)
        body = read(await read_body(request.scope, request.receive, MAX_REQUEST_BYTES), _CREATE)
        values = {name: getattr(body, name) for name in wire.CreateSandboxBody.__struct_fields__}
        frame = wire.CreateFrame(**values, sandbox_id=wire.read_sandbox_id(sandbox_id))
        with anyio.move_on_after(self._slow_start_s):
            reply = await self._calls.create(frame, caller)
            if reply.state in (SandboxState.LOST, SandboxState.STOPPED):
                why = f"sandbox {sandbox_id} has ended: {reply.phases[-1].reason}"
                raise SandboxConflictError(f"{why}; DELETE it to free its name, or choose another")
            return _json(write(reply), is_starting=reply.state is SandboxState.STARTING)
        return _json(write(wire.StartingReply(sandbox_id)), is_starting=True)

    async def views(self, request: Request) -> Response:
        """List all sandboxes."""
        return _json(write(await self._calls.views(NoBody(), caller_of(request.scope))))

    async def view(self, sandbox_id: str, request: Request) -> Response:
        """Return the state of a sandbox without renewing its lease. Ended sandboxes stay visible for ten minutes."""
        return _json(write(await self._calls.view(wire.SandboxFrame(sandbox_id), caller_of(request.scope))))

    async def stop(self, sandbox_id: str, request: Request) -> Response:
        """Stop a sandbox and delete its contents. The call is safe to repeat; it succeeds if there is no such sandbox.

        Afterwards, `PUT` can start a new sandbox with the same id.
        """
        return _json(write(await self._calls.stop(wire.SandboxFrame(sandbox_id), caller_of(request.scope))))

    async def log(self, sandbox_id: str, request: Request) -> Response:
        """Return the last 64 KiB that the command of a sandbox wrote to standard error."""
        return _json(write(await self._calls.log(wire.SandboxFrame(sandbox_id), caller_of(request.scope))))

    async def stats(self, sandbox_id: str, request: Request) -> Response:
        """Return the resource usage of a sandbox."""
        return _json(write(await self._calls.stats(wire.SandboxFrame(sandbox_id), caller_of(request.scope))))

    async def exec(self, sandbox_id: str) -> Response:
        """Run a program in a sandbox and return its output when it has ended.

        If the caller disconnects, the program is killed. If the call has an idempotency key, the program continues
        instead, and the caller can repeat the call to get the output.
        """
        return _AsgiResponse(partial(self._paths.exec, sandbox_id))

    async def execs(self, request: Request) -> Response:
        """Run programs in many sandboxes concurrently. Return a list with the result or error of each program, in
        order.
        """
        caller = caller_of(request.scope)
        data = await read_body(request.scope, request.receive, MAX_EXEC_BYTES)
        bodies = read_each(data, _EXECS, _EXEC)
        if len(bodies) > _MAX_EXECS:
            raise RequestError(f"too many programs in one list (limit {_MAX_EXECS}, got {len(bodies)}); split the list")
        caller.take(max(0, len(bodies) - 1))  # the request itself is already counted
        output_bytes = sum(bytes_to_reserve(body) for body in bodies if not isinstance(body, RequestError))
        if output_bytes > _MAX_OUTPUT_BYTES:
            wanted = f"limit {_MAX_OUTPUT_BYTES} bytes, got {output_bytes}"
            raise RequestError(f"the output limits of the list are too large together ({wanted}); split the list")
        await reservation_of(request.scope).reserve(output_bytes)
        outcomes = [b""] * len(bodies)

        async def run(index: int, body: wire.ExecFrame | RequestError) -> None:
            if isinstance(body, RequestError):
                outcome = self._calls.access.failure(body)
            else:
                outcome = await self._calls.access.outcome(partial(self._calls.work.exec, body, caller))
            outcomes[index] = outcome.framed

        async def run_all() -> None:
            async with anyio.create_task_group() as tasks:
                for index, body in enumerate(bodies):
                    tasks.start_soon(run, index, body)

        await self._paths.until_disconnect(request.receive, run_all)
        return _json(b"[%b]" % b",".join(outcomes))

    async def shell(self, sandbox_id: str, name: str) -> Response:
        """Run a command in a persistent shell, which keeps its folder, variables and functions for later commands.

        If the caller disconnects, the command is killed. If the call has an idempotency key, the command continues
        instead, and the caller can repeat the call to get the output.
        """
        return _AsgiResponse(partial(self._paths.shell, sandbox_id, name))

    async def close_shell(self, sandbox_id: str, name: str, request: Request) -> Response:
        """Close a shell and kill all processes that it started. The call is safe to repeat."""
        frame = wire.CloseShellFrame(sandbox_id, wire.read_sandbox_id(name), user_of(request.scope))
        return _json(write(await self._calls.work.close_shell(frame, caller_of(request.scope))))

    async def read(self, sandbox_id: str, request: Request) -> Response:
        """Read a file."""
        scope = request.scope
        max_bytes = number_of(scope, "max_bytes", MAX_FILE_BYTES, most=MAX_FILE_BYTES)
        frame = wire.ReadFrame(sandbox_id, path_of(scope), max_bytes, file_user_of(scope))
        return Response(
            await self._calls.work.read_file(frame, caller_of(scope), reservation_of(scope)), media_type=_BYTES
        )

    async def write(self, sandbox_id: str, request: Request) -> Response:
        """Write a file atomically: if writing fails, the file is unchanged. Missing folders are created."""
        scope = request.scope
        caller = caller_of(scope)
        path, key, user = path_of(scope), key_of(scope), file_user_of(scope)
        mode = number_of(scope, "mode", _NO_MODE, base=8, most=0o777)
        # Reject an unknown sandbox now, before the body is read.
        self._calls.access.find(sandbox_id, caller)
        content = await read_body(scope, request.receive, MAX_FILE_BYTES)
        frame = wire.WriteFrame(sandbox_id, path, content, None if mode == _NO_MODE else mode, key, user)
        return _response(await self._calls.work.write(frame, caller))

    async def download_tree(self, sandbox_id: str) -> Response:
        """Download a file or folder as a tar stream. The paths in the stream begin with ``tree`` or with ``.``."""
        return _AsgiResponse(partial(self._paths.download_tree, sandbox_id))

    async def upload_tree(self, sandbox_id: str) -> Response:
        """Upload a tar stream with one file, link or folder. `path` is where it is stored in the sandbox."""
        return _AsgiResponse(partial(self._paths.upload_tree, sandbox_id))

    async def snapshot(self, sandbox_id: str, request: Request) -> Response:
        """Take a snapshot of the files of a sandbox. New sandboxes can start from the snapshot."""
        frame = wire.SnapshotFrame(sandbox_id, key_of(request.scope))
        return _response(await self._calls.snapshot(frame, caller_of(request.scope)))

    async def snapshots(self, request: Request) -> Response:
        """List all snapshots with their sizes, oldest first."""
        return _json(write(await self._calls.snapshots(NoBody(), caller_of(request.scope))))

    async def remove_snapshot(self, snapshot: str, request: Request) -> Response:
        """Remove a snapshot. The call is safe to repeat, and succeeds if the snapshot does not exist."""
        return _json(write(await self._calls.remove_snapshot(wire.KeptFrame(snapshot), caller_of(request.scope))))

    async def events(self) -> Response:
        """Stream the events of sandboxes as server-sent events, with a heartbeat every 15 s.

        The data of each event is an `EventReply`.
        """
        return _AsgiResponse(self._paths.events)


class _AsgiResponse(Response):
    """A response that an ASGI application sends itself, such as a stream."""

    def __init__(self, send: ASGIApp) -> None:
        super().__init__()
        self._send = send

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._send(scope, receive, send)


def _json(body: bytes, *, is_starting: bool = False) -> Response:
    headers = {"Retry-After": str(RETRY_AFTER_S)} if is_starting else None
    return Response(body, 202 if is_starting else 200, headers, "application/json")


def _response(outcome: CallOutcome) -> Response:
    if outcome.status < 400:
        return _json(outcome.body)
    after_s = outcome.retry_after_s
    headers = None if after_s is None else {"Retry-After": str(after_s)}
    return Response(outcome.body, outcome.status, headers, "application/problem+json")


def _more(*parameters: dict[str, Any], takes: str | None = None) -> dict[str, Any]:
    more: dict[str, Any] = {"parameters": list(parameters)}
    if takes is not None:
        content = {takes: {"schema": {"type": "string", "format": "binary"}}}
        more["requestBody"] = {"required": True, "content": content}
    return more


def _query(name: str, description: str, schema: dict[str, Any], *, required: bool = False) -> dict[str, Any]:
    return {"in": "query", "name": name, "description": description, "schema": schema, "required": required}


def _header(name: str, description: str) -> dict[str, Any]:
    return {"in": "header", "name": name, "description": description, "schema": {"type": "string"}}
