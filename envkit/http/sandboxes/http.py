"""Answers requests about sandboxes without a web framework if they are frequent or have streamed bodies."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from types import TracebackType
from typing import Any, TypeAlias, TypeVar
from urllib.parse import parse_qs

import anyio
import msgspec

from envkit.errors import EnvkitError, RequestError, UnsupportedError
from envkit.http.auth.caller import Caller, caller_of
from envkit.http.limits.memory_budget import reservation_of
from envkit.http.protocol import sandbox_messages as wire
from envkit.http.protocol.asgi import JSON, PROBLEM, Message, Receive, Scope, Send, read_body, respond
from envkit.http.protocol.messages import DoneReply, read, write
from envkit.http.sandboxes.idempotency import CallOutcome
from envkit.http.sandboxes.lookup import seen_by
from envkit.http.sandboxes.operations import SandboxOperations
from envkit.http.sandboxes.transfers import MAX_TREE_BYTES, FolderTransfers
from envkit.http.sandboxes.work import bytes_to_reserve
from envkit.types import FileUser, PoolEvent, SandboxUser

MAX_EXEC_BYTES = 32 << 20
"""Limit on the request body of a program or command, including its input."""

HEARTBEAT_S = 15.0
"""Seconds between the heartbeats of an event stream."""

_WATCH_DELAY_S = 0.05

_EXEC = msgspec.json.Decoder(wire.ExecBody)
_SHELL = msgspec.json.Decoder(wire.ShellBody)

_USER: Any = SandboxUser

T = TypeVar("T")
Answered: TypeAlias = Callable[[Caller], Awaitable[CallOutcome]]


class SandboxPaths:
    """Answers HTTP requests about sandboxes.

    Args:
        calls: The operations on sandboxes.
        folders: Uploads and downloads folders; None if this server does not support that.
    """

    def __init__(self, calls: SandboxOperations, folders: FolderTransfers | None) -> None:
        self.calls = calls
        self._folders = folders

    async def answer_hot(self, scope: Scope, receive: Receive, send: Send) -> bool:
        """Answer a request to run a program or a shell command. Return False for any other request, without an
        answer.
        """
        path: str = scope["path"]
        if scope["method"] != "POST" or not path.startswith(wire.BEFORE_ID) or scope.get("query_string"):
            return False
        id, *rest = path[len(wire.BEFORE_ID) :].split("/")
        if rest == ["exec"]:
            await self.exec(id, scope, receive, send)
        elif len(rest) == 2 and rest[0] == "shells":
            await self.shell(id, rest[1], scope, receive, send)
        else:
            return False
        return True

    async def exec(self, id: str, scope: Scope, receive: Receive, send: Send) -> None:
        async def answer(caller: Caller) -> CallOutcome:
            body = read(await read_body(scope, receive, MAX_EXEC_BYTES), _EXEC)
            frame = wire.ExecFrame(*msgspec.structs.astuple(body), sandbox_id=id, key=key_of(scope))
            if count := bytes_to_reserve(frame):
                await reservation_of(scope).reserve(count)
            return await self._run(partial(self.calls.work.exec, frame, caller), frame.key, receive)

        await self._answer(answer, scope, send)

    async def shell(self, id: str, name: str, scope: Scope, receive: Receive, send: Send) -> None:
        async def answer(caller: Caller) -> CallOutcome:
            body = read(await read_body(scope, receive, MAX_EXEC_BYTES), _SHELL)
            shell = wire.read_sandbox_id(name)
            frame = wire.ShellFrame(*msgspec.structs.astuple(body), sandbox_id=id, shell=shell, key=key_of(scope))
            if count := bytes_to_reserve(frame):
                await reservation_of(scope).reserve(count)
            return await self._run(partial(self.calls.work.shell, frame, caller), frame.key, receive)

        await self._answer(answer, scope, send)

    async def upload_tree(self, id: str, scope: Scope, receive: Receive, send: Send) -> None:
        async def answer(caller: Caller) -> CallOutcome:
            folders, sandbox = self._require_folders(), self.calls.access.find(id, caller)
            with self.calls.access.with_caller_ids(id, caller):
                await folders.upload(sandbox, path_of(scope), file_user_of(scope), receive, tenant=caller.tenant)
            return CallOutcome(write(DoneReply()))

        await self._answer(answer, scope, send)

    async def download_tree(self, id: str, scope: Scope, receive: Receive, send: Send) -> None:
        has_started = False

        async def send_and_note(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            caller = caller_of(scope)
            folders, sandbox = self._require_folders(), self.calls.access.find(id, caller)
            path, max_bytes = path_of(scope), number_of(scope, "max_bytes", MAX_TREE_BYTES)
            user = file_user_of(scope)
            with self.calls.access.with_caller_ids(id, caller):
                await folders.download(sandbox, path, user, max_bytes, send_and_note, tenant=caller.tenant)
        except Exception as error:
            if has_started:
                # The response has begun, so the server can report the error only by closing the connection.
                raise
            await respond_outcome(send, self.calls.access.failure(error))

    async def events(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Stream events of sandboxes as server-sent events until the caller disconnects or the server shuts down."""
        try:
            self.calls.access.refuse_when_closing()
            last = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"last-event-id"), "0")
            after = number_of(scope, "after", int(last) if last.isascii() and last.isdigit() else 0)
        except EnvkitError as error:
            await respond_outcome(send, self.calls.access.failure(error))
            return
        caller = caller_of(scope)
        tenant = seen_by(caller)
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_cancel_on_disconnect, receive, tasks.cancel_scope)
                tasks.start_soon(self.calls.access.cancel_when_closing, tasks.cancel_scope)
                tasks.start_soon(_send_heartbeats, send)
                async for event in self.calls.access.pool.events(after=after):
                    if tenant in (None, event.tenant):
                        await send({"type": "http.response.body", "body": _encode(event, caller), "more_body": True})
                tasks.cancel_scope.cancel()
            await send({"type": "http.response.body", "body": b""})
        except* OSError:
            # The caller has disconnected, and the server aborts the unfinished stream.
            pass

    async def until_disconnect(self, receive: Receive, work: Callable[[], Awaitable[T]]) -> T | None:
        """Run `work` and return its result. If the caller disconnects, cancel `work` and return None.

        `work` must not raise errors.
        """
        with _CancelOnDisconnect(receive):
            return await work()
        return None

    async def _run(self, work: Callable[[], Awaitable[CallOutcome]], key: str | None, receive: Receive) -> CallOutcome:
        if key is not None:
            return await work()
        return await self.until_disconnect(receive, partial(self.calls.access.outcome, work)) or _DISCONNECTED

    async def _answer(self, answer: Answered, scope: Scope, send: Send) -> None:
        try:
            outcome = await answer(caller_of(scope))
        except Exception as error:
            outcome = self.calls.access.failure(error)
        await respond_outcome(send, outcome)

    def _require_folders(self) -> FolderTransfers:
        if self._folders is None:
            raise UnsupportedError("this server has no folder upload and download")
        return self._folders


_DISCONNECTED = CallOutcome(b"{}", 499)
"""The outcome of a call whose caller disconnected."""


class _CancelOnDisconnect:
    """A context manager that cancels its block when the caller disconnects.

    It starts to watch the connection after `_WATCH_DELAY_S` seconds. Most calls have ended by then, and the task that
    watches the connection costs as much time as a call.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._scope = anyio.CancelScope()
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = None

    def __enter__(self) -> None:
        self._timer = self._loop.call_later(_WATCH_DELAY_S, self._start_watching)
        self._scope.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._timer.cancel()
        if self._task is not None:
            self._task.cancel()
        return self._scope.__exit__(kind, error, trace)

    def _start_watching(self) -> None:
        self._task = self._loop.create_task(_cancel_on_disconnect(self._receive, self._scope))


async def respond_outcome(send: Send, outcome: CallOutcome) -> None:
    """Send the outcome of a call as a complete HTTP response."""
    after_s = outcome.retry_after_s
    headers = [] if after_s is None else [(b"retry-after", b"%d" % after_s)]
    content_type = JSON if outcome.status < 400 else PROBLEM
    await respond(send, outcome.body, status=outcome.status, content_type=content_type, headers=headers)


def key_of(scope: Scope) -> str | None:
    """Return the header ``Idempotency-Key`` of a request; None if missing.

    Raises:
        RequestError: The header is not a valid key.
    """
    found = next((value for name, value in scope["headers"] if name == b"idempotency-key"), None)
    return None if found is None else wire.read_key(found.decode("latin-1"))


def path_of(scope: Scope) -> str:
    """Return the query parameter ``path`` of a request. Bytes are percent-encoded and may have any value except NUL.

    Raises:
        RequestError: The parameter is missing or contains NUL.
    """
    path = query_of(scope).get("path", "")
    if not path or "\0" in path:
        raise RequestError("path: must be the name of a file or folder in the sandbox, without NUL")
    return path


def number_of(scope: Scope, name: str, default: int, *, base: int = 10, most: int = 1 << 53) -> int:
    """Return the number in the query parameter `name` of a request; `default` if the parameter is missing.

    Raises:
        RequestError: The parameter is not a number in this `base`, or it is above `most`.
    """
    text = query_of(scope).get(name)
    if text is None:
        return default
    digits = "0123456789"[:base]
    if not 0 < len(text) <= 16 or any(one not in digits for one in text) or int(text, base) > most:
        bound = f"{most:o}" if base == 8 else str(most)
        raise RequestError(f"{name}: must be a number in the digits {digits}, {bound} at most, got {text[:100]!r}")
    return int(text, base)


def file_user_of(scope: Scope) -> FileUser:
    """Return the query parameter ``user`` of a request about a file: the user that reads or writes the file.

    Raises:
        RequestError: The parameter is neither "agent" nor "grader".
    """
    user = user_of(scope)
    if user == "root":
        raise RequestError("user: must be agent or grader for files, got root")
    return user


def user_of(scope: Scope) -> SandboxUser:
    """Return the query parameter ``user`` of a request; "agent" if missing.

    Raises:
        RequestError: The parameter is not a user of sandboxes.
    """
    try:
        user: SandboxUser = msgspec.convert(query_of(scope).get("user", "agent"), _USER)
    except msgspec.ValidationError:
        raise RequestError("user: must be agent, grader or root") from None
    return user


def query_of(scope: Scope) -> dict[str, str]:
    """Return the query parameters of a request. If a name is repeated, its last value is returned.

    Raises:
        RequestError: The query cannot be parsed.
    """
    query: bytes = scope.get("query_string", b"")
    try:
        found = parse_qs(query.decode("latin-1"), errors="surrogateescape", keep_blank_values=True)
    except ValueError as error:
        raise RequestError(f"the query cannot be parsed: {error}") from None
    return {name: values[-1] for name, values in found.items()}


async def _cancel_on_disconnect(receive: Receive, scope: anyio.CancelScope) -> None:
    """Cancel `scope` when the caller disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


async def _send_heartbeats(send: Send) -> None:
    while True:
        await anyio.sleep(HEARTBEAT_S)
        await send({"type": "http.response.body", "body": b": alive\n\n", "more_body": True})


def _encode(event: PoolEvent, caller: Caller) -> bytes:
    name = event.sandbox_id and caller.name(event.sandbox_id)
    state, cause = event.state, event.cause
    reply = wire.EventReply(event.number, event.at_s, event.kind, name, event.tenant, event.text, state, cause)
    kind = "".join(one for one in event.kind if one.isprintable())
    return b"id: %d\nevent: %b\ndata: %b\n\n" % (event.number, kind.encode(), write(reply))
