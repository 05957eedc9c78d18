"""The routes about sandboxes, as the described API has them; see `envkit.http.api.openapi`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import anyio
import msgspec
from fastapi import Request, Response

from envkit.errors import CapacityError, RateLimitError, RequestError, SandboxConflictError
from envkit.http.auth.caller import Caller, caller_of
from envkit.http.limits.memory_budget import Reservation, room_of
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
from envkit.http.sandboxes.operations import SandboxOperations
from envkit.http.sandboxes.transfers import MAX_FILE_BYTES, TAR
from envkit.http.sandboxes.work import room_for
from envkit.types import SandboxState

_SANDBOXES = f"/v{PROTOCOL}/sandboxes"
_SANDBOX = f"{_SANDBOXES}/{{sandbox_id}}"
_CREATE = msgspec.json.Decoder(wire.CreateSandboxBody)
_EXEC = msgspec.json.Decoder(wire.ExecFrame)
_EXECS = msgspec.json.Decoder(list[wire.ExecFrame])
_MAX_EXECS = 1000
_NO_MODE = -1
_BYTES = "application/octet-stream"


class ExecOutcome(msgspec.Struct, frozen=True):
    """One answer among several: either what a program did, or what went wrong; the other is left out."""

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
    """Adds a route to the described API."""

    def __call__(
        self,
        verb: str,
        path: str,
        route: Any,
        reply: Any = None,
        body: Any = None,
        opening: Any = None,
        more: dict[str, Any] | None = None,
        gives: str | None = None,
    ) -> None: ...


def add_routes(add: Add, paths: SandboxPaths, slow_start_s: float) -> None:
    """Add the routes about sandboxes.

    Args:
        add: Adds one.
        paths: What they call.
        slow_start_s: Seconds after which a start that goes on is answered with 202.
    """
    routes = _SandboxRoutes(paths, slow_start_s)
    key = _header("Idempotency-Key", "Makes the call safe to repeat: the same key with the same body, the same answer.")
    path = _query("path", "Name of the file or folder in the sandbox.", {"type": "string"}, required=True)
    size = _query("max_bytes", "More than this is refused.", {"type": "integer"})
    mode = _query("mode", "Permissions, octal, such as 755.", {"type": "string", "pattern": "^[0-7]{1,4}$"})
    user = _query("user", "Whose shell it is.", {"enum": ["agent", "grader", "root"]})
    owner = _query("user", "Whose file it is.", {"enum": ["agent", "grader"]})
    after = _query("after", "Number of the last event that is known.", {"type": "integer"})
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
    add("GET", f"{_SANDBOX}/files", routes.read, more=_more(path, size, owner), gives=_BYTES)
    add("PUT", f"{_SANDBOX}/files", routes.write, DoneReply, more=_more(path, mode, owner, key, takes=_BYTES))
    add("GET", f"{_SANDBOX}/tree", routes.give_tree, more=_more(path, size, owner), gives=TAR.decode())
    add("PUT", f"{_SANDBOX}/tree", routes.take_tree, DoneReply, more=_more(path, owner, takes=TAR.decode()))
    add("POST", f"{_SANDBOX}/snapshot", routes.snapshot, wire.SnapshotReply, more=_more(key))
    add("GET", f"/v{PROTOCOL}/snapshots", routes.snapshots, wire.SnapshotsReply)
    add("DELETE", f"/v{PROTOCOL}/snapshots/{{snapshot}}", routes.remove_snapshot, DoneReply)
    add("GET", f"/v{PROTOCOL}/events", routes.events, more=_more(after), gives="text/event-stream")


class _SandboxRoutes:
    """One method a route: decode, one call, encode."""

    def __init__(self, paths: SandboxPaths, slow_start_s: float) -> None:
        self._paths = paths
        self._calls = paths.calls
        self._slow_start_s = slow_start_s

    async def create(self, sandbox_id: str, request: Request) -> Response:
        """Start a sandbox: what it is to be in, what has become of it out. Repeating the call is safe.

        202 means that the start takes its time: repeat the call until it gives the sandbox. With `snapshot`, it begins
        with files that were kept. 409 means that the name belongs to another one; or to one that is over without having
        been deleted, so that nobody takes an empty one for it: `DELETE` frees the name, as do ten minutes.
        """
        caller = caller_of(request.scope)
        body = read(await read_body(request.scope, request.receive, MAX_REQUEST_BYTES), _CREATE)
        values = {name: getattr(body, name) for name in wire.CreateSandboxBody.__struct_fields__}
        frame = wire.CreateFrame(**values, sandbox_id=wire.read_sandbox_id(sandbox_id))
        with anyio.move_on_after(self._slow_start_s):
            reply = await self._calls.create(frame, caller)
            if reply.state in (SandboxState.LOST, SandboxState.STOPPED):
                why = f"sandbox {sandbox_id} is over: {reply.phases[-1].reason}"
                raise SandboxConflictError(f"{why}; DELETE it to free its name, or choose another")
            return _json(write(reply), is_starting=reply.state is SandboxState.STARTING)
        return _json(write(wire.StartingReply(sandbox_id)), is_starting=True)

    async def views(self, request: Request) -> Response:
        """Look at all sandboxes."""
        return _json(write(await self._calls.views(NoBody(), caller_of(request.scope))))

    async def view(self, sandbox_id: str, request: Request) -> Response:
        """Look at a sandbox, without keeping it from expiring; those that are over can be seen for a while."""
        return _json(write(await self._calls.view(wire.SandboxFrame(sandbox_id), caller_of(request.scope))))

    async def stop(self, sandbox_id: str, request: Request) -> Response:
        """End a sandbox with everything in it. Repeating the call is safe, as is ending one that does not exist.

        Its name is free afterwards: `PUT` makes a new one.
        """
        return _json(write(await self._calls.stop(wire.SandboxFrame(sandbox_id), caller_of(request.scope))))

    async def log(self, sandbox_id: str, request: Request) -> Response:
        """Read the end of what the sandbox's command wrote to standard error."""
        return _json(write(await self._calls.log(wire.SandboxFrame(sandbox_id), caller_of(request.scope))))

    async def stats(self, sandbox_id: str, request: Request) -> Response:
        """Ask the sandbox what it uses of the machine."""
        return _json(write(await self._calls.stats(wire.SandboxFrame(sandbox_id), caller_of(request.scope))))

    async def exec(self, sandbox_id: str) -> Response:
        """Run a program to its end.

        A caller that goes away ends it, unless the call has a key: then it goes on, and can be asked for again.
        """
        return _Sent(partial(self._paths.exec, sandbox_id))

    async def execs(self, request: Request) -> Response:
        """Run programs in many sandboxes at once: a list in, and a list of results or errors out, in the same order."""
        caller = caller_of(request.scope)
        data = await read_body(request.scope, request.receive, MAX_EXEC_BYTES)
        bodies = read_each(data, _EXECS, _EXEC)
        if len(bodies) > _MAX_EXECS:
            raise RequestError(f"a list may have {_MAX_EXECS} programs, got {len(bodies)}")
        caller.take(max(0, len(bodies) - 1))  # the request itself was counted before
        programs = _Programs(self._calls, caller, room_of(request.scope))
        await self._paths.unless_left(request.receive, partial(programs.run, bodies))
        return _json(b"[%b]" % b",".join(programs.outcomes))

    async def shell(self, sandbox_id: str, name: str) -> Response:
        """Run a command in a shell that stays: folder, variables and functions are there for the next.

        A caller that goes away ends the command, unless the call has a key: then it goes on, and can be asked for
        again.
        """
        return _Sent(partial(self._paths.shell, sandbox_id, name))

    async def close_shell(self, sandbox_id: str, name: str, request: Request) -> Response:
        """End a shell and everything that it started. Repeating the call is safe."""
        frame = wire.CloseShellFrame(sandbox_id, wire.read_sandbox_id(name), user_of(request.scope))
        return _json(write(await self._calls.work.close_shell(frame, caller_of(request.scope))))

    async def read(self, sandbox_id: str, request: Request) -> Response:
        """Read a file."""
        scope = request.scope
        max_bytes = number_of(scope, "max_bytes", MAX_FILE_BYTES, most=MAX_FILE_BYTES)
        frame = wire.ReadFrame(sandbox_id, path_of(scope), max_bytes, file_user_of(scope))
        return Response(await self._calls.work.read_file(frame, caller_of(scope), room_of(scope)), media_type=_BYTES)

    async def write(self, sandbox_id: str, request: Request) -> Response:
        """Write a file, as a whole or not at all; its folders are made."""
        scope = request.scope
        caller = caller_of(scope)
        path, key, user = path_of(scope), key_of(scope), file_user_of(scope)
        mode = number_of(scope, "mode", _NO_MODE, base=8, most=0o777)
        self._calls.access.find(sandbox_id, caller)  # before all of it is read
        content = await read_body(scope, request.receive, MAX_FILE_BYTES)
        frame = wire.WriteFrame(sandbox_id, path, content, None if mode == _NO_MODE else mode, key, user)
        return _of(await self._calls.work.write(frame, caller, room_of(scope)))

    async def give_tree(self, sandbox_id: str) -> Response:
        """Copy a file or folder out of the sandbox, as a tar stream whose names begin with ``tree`` or with ``.``."""
        return _Sent(partial(self._paths.give_tree, sandbox_id))

    async def take_tree(self, sandbox_id: str) -> Response:
        """Copy a tar stream with one file, link or folder into the sandbox; `path` is its new name."""
        return _Sent(partial(self._paths.take_tree, sandbox_id))

    async def snapshot(self, sandbox_id: str, request: Request) -> Response:
        """Keep the sandbox's files as they are now, under a name with which another one can begin."""
        frame = wire.SnapshotFrame(sandbox_id, key_of(request.scope))
        return _of(await self._calls.snapshot(frame, caller_of(request.scope), room_of(request.scope)))

    async def snapshots(self, request: Request) -> Response:
        """Look at all snapshots, with their sizes, oldest first."""
        return _json(write(await self._calls.snapshots(NoBody(), caller_of(request.scope))))

    async def remove_snapshot(self, snapshot: str, request: Request) -> Response:
        """Remove a snapshot. Repeating the call is safe, as is removing one that does not exist."""
        return _json(write(await self._calls.remove_snapshot(wire.KeptFrame(snapshot), caller_of(request.scope))))

    async def events(self) -> Response:
        """Follow what happens: server-sent events with an `EventReply` each, and a sign of life each 15 s."""
        return _Sent(self._paths.events)


class _Programs:
    """The programs of one list.

    Args:
        calls: Run them.
        caller: Who asks.
        room: Where what they said is counted until it is sent.
    """

    def __init__(self, calls: SandboxOperations, caller: Caller, room: Reservation) -> None:
        self.outcomes: list[bytes] = []
        self._calls = calls
        self._caller = caller
        self._room = room
        self._said = 0
        self._running = 0

    async def run(self, bodies: Sequence[wire.ExecFrame | RequestError]) -> None:
        """Run all at once, as far as there is room for what they may say."""
        self.outcomes = [b""] * len(bodies)
        async with anyio.create_task_group() as tasks:
            for index, body in enumerate(bodies):
                if isinstance(body, RequestError):
                    self._take(index, self._calls.access.failure(body))
                else:
                    tasks.start_soon(self._run, index, body)

    async def _run(self, index: int, body: wire.ExecFrame) -> None:
        room = self._room.another()
        try:
            self._take(index, await self._calls.access.attempt(partial(self._run_in, room, body)))
        finally:
            room.free()

    async def _run_in(self, room: Reservation, body: wire.ExecFrame) -> CallOutcome:
        while True:
            try:
                await room.expect(room_for(body))
                break
            except (RateLimitError, CapacityError):
                if not self._running:  # else those have it, and will give it back
                    raise
        self._running += 1
        try:
            return await self._calls.work.exec(body, self._caller, room)
        finally:
            self._running -= 1

    def _take(self, index: int, outcome: CallOutcome) -> None:
        self.outcomes[index] = outcome.framed
        self._said += len(self.outcomes[index])
        self._room.settle(self._said)


class _Sent(Response):
    """A response that an ASGI application sends by itself."""

    def __init__(self, send: ASGIApp) -> None:
        super().__init__()
        self._send = send

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._send(scope, receive, send)


def _json(body: bytes, *, is_starting: bool = False) -> Response:
    headers = {"Retry-After": str(RETRY_AFTER_S)} if is_starting else None
    return Response(body, 202 if is_starting else 200, headers, "application/json")


def _of(outcome: CallOutcome) -> Response:
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
