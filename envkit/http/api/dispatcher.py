"""Runs the calls of all operations, and answers their HTTP requests.

The handler of an operation makes the reply to a call, over HTTP and over the WebSocket. If the handler raises an error,
the caller gets a problem object. Of the calls with the same idempotency key, only the first runs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import partial
from typing import Any

import anyio
import msgspec

from envkit.errors import EnvkitError, SandboxConflictError, SandboxNotFoundError, UnknownPathError
from envkit.http.api.session_operations import SessionOperations
from envkit.http.auth.caller import Caller, caller_of
from envkit.http.protocol.asgi import (
    RETRY_AFTER_S,
    CallOutcome,
    Handler,
    HttpCall,
    Receive,
    Scope,
    Send,
    handlers_of,
    parameters,
    read_body,
    respond_outcome,
    until_disconnect,
)
from envkit.http.protocol.messages import ReadyReply, read, write
from envkit.http.protocol.operations import NODE_FACTS, Operation
from envkit.http.protocol.sandbox_messages import SandboxReply
from envkit.http.sandboxes.access import MAX_EXEC_BYTES, SandboxAccess
from envkit.http.sandboxes.idempotency import IdempotentCalls
from envkit.types import SandboxState


class Dispatcher:
    """Runs the calls of all operations. The arguments are those of `envkit.http.api.app.create_app`.

    Attributes:
        keyed: Runs the calls that have an idempotency key, and stores their answers.
        sandboxes: Finds the sandboxes that callers have leased; None if the server lends no sandboxes.
    """

    def __init__(self, operations: SessionOperations, *, slow_s: float, max_request_bytes: int) -> None:
        self.operations = operations
        self.sandboxes: SandboxAccess | None = None
        self.keyed = IdempotentCalls(operations.failure)
        self._slow_s = slow_s
        self._max_request_bytes = max_request_bytes
        self._handlers: dict[str, Handler] = {}
        self.bind(operations)

    def bind(self, owner: object) -> None:
        """Register each method of `owner` that is decorated with `handles` or `handles_http` as a handler."""
        self._handlers |= {operation.name: handler for operation, handler in handlers_of(owner)}

    def handler(self, operation: Operation[Any, Any]) -> Handler | None:
        """Return the handler of an operation; None if the server does not offer the operation."""
        return self._handlers.get(operation.name)

    async def outcome(self, operation: Operation[Any, Any], body: Any, caller: Caller) -> CallOutcome:
        """Run a call, and return its reply or error. If it repeats a call with its key, return the stored outcome."""
        if not operation.has_key or body.key is None:
            return await self._run(operation, body, caller)
        work = partial(self._run, operation, body, caller)
        try:
            if self.sandboxes is not None:
                # Fail here if the sandbox cannot be used: `keyed.run` would store that error as the key's answer.
                self.sandboxes.find(body.sandbox_id, caller)
            return await self.keyed.run(caller.key(body.sandbox_id), body.key, content_hash(body), work)
        except EnvkitError as error:
            return self.operations.failure(error)

    async def _run(self, operation: Operation[Any, Any], body: Any, caller: Caller) -> CallOutcome:
        session_id: str | None = getattr(body, "session_id", None)
        try:
            reply = await self._require_handler(operation)(body, caller)
            content = write(reply)
            return CallOutcome(content, 503 if isinstance(reply, ReadyReply) and not reply.ready else 200)
        except Exception as error:
            return self.operations.failure(error, caller, session_id)

    async def respond(
        self, operation: Operation[Any, Any], values: Mapping[str, str], scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Answer the HTTP request for an operation. `values` contains the parameters in the path of the request."""
        call = HttpCall(caller_of(scope), scope, receive, send)
        try:
            outcome = await self._answer(operation, values, call)
        except Exception as error:
            if call.has_started:
                # A part of the response is already sent, so only closing the connection can report the error.
                raise
            outcome = self.operations.failure(error, call.caller, values.get("session_id"))
        if outcome is not None:
            await respond_outcome(send, outcome)

    async def _answer(
        self, operation: Operation[Any, Any], values: Mapping[str, str], call: HttpCall
    ) -> CallOutcome | None:
        handler = self._require_handler(operation)
        given = parameters(operation, values, call.scope)
        if operation.is_raw:
            found: CallOutcome | None = await handler(operation.request(**given), call)
            return found
        if operation.json_body is not None:
            limit = MAX_EXEC_BYTES if operation.runs_program else self._max_request_bytes
            body = read(await read_body(call.scope, call.receive, limit), operation.body_decoder)
            given |= {name: getattr(body, name) for name in body.__struct_fields__}
        request = operation.request(**given)
        if operation.runs_program and request.key is None:
            return await until_disconnect(call.receive, partial(self.outcome, operation, request, call.caller))
        if 202 not in operation.replies:
            return await self.outcome(operation, request, call.caller)
        with anyio.move_on_after(self._slow_s):
            return await self._finish(operation, request, call)
        pending = msgspec.convert(request, operation.replies[202], from_attributes=True)
        return CallOutcome(write(pending), 202, RETRY_AFTER_S)

    async def _finish(self, operation: Operation[Any, Any], request: Any, call: HttpCall) -> CallOutcome:
        """Run a call that may be slow."""
        reply = await self._require_handler(operation)(request, call.caller)
        if isinstance(reply, SandboxReply):
            if reply.state in (SandboxState.LOST, SandboxState.STOPPED):
                why = f"sandbox {request.sandbox_id} has ended: {reply.phases[-1].reason}"
                raise SandboxConflictError(f"{why}; send DELETE to free its id, or choose another id")
            if reply.state is SandboxState.STARTING:
                return CallOutcome(write(reply), 202, RETRY_AFTER_S)
        return CallOutcome(write(reply))

    def _require_handler(self, operation: Operation[Any, Any]) -> Handler:
        try:
            return self._handlers[operation.name]
        except KeyError:
            if operation.name.startswith("node"):
                is_node = NODE_FACTS.name in self._handlers
                raise UnknownPathError(f"this server {'is a node itself' if is_node else 'has no nodes'}") from None
            raise SandboxNotFoundError("this server lends no sandboxes") from None


def content_hash(body: msgspec.Struct) -> bytes:
    """Return a hash of a request's content, to detect that a key is used again with different content."""
    digest = hashlib.blake2b(type(body).__name__.encode(), digest_size=32)
    for name in body.__struct_fields__:
        value = getattr(body, name)
        part = value if isinstance(value, bytes) else repr(value).encode(errors="surrogatepass")
        digest.update(b"%b %d " % (name.encode(), len(part)))
        digest.update(part)
    return digest.digest()
