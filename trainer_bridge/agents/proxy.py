"""The proxy: an ASGI application through which an agent program calls the policy, as if it were OpenAI or Anthropic.

An episode is registered under a secret, by which its requests are recognised: in the URL (``/e/SECRET/v1/...``), or as
the API key (``/v1/...``). The routes are ``chat/completions``, ``responses``, ``messages``, ``messages/count_tokens``,
``models``, and ``step``, with which an agent beside the sandbox plays an action. Any name of a model means the policy.
The engine answers in one piece. While a client waits for a stream, it gets keep-alives.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import Any

import anyio
import msgspec

from envkit import clock

from . import openai_chat
from .anthropic_messages import DIALECT as MESSAGES
from .connection import ClientGoneError, Connection, HttpError, Message, Receive, Send
from .dialect import Answer, Body, Dialect, refused
from .messages import CallRefusedError, EpisodeCalls, RefusalKind
from .open_calls import Attempt, OpenCall, OpenCalls
from .responses import ResponseStore

KEEP_ALIVE_S = 5.0
"""Seconds without data after which a waiting stream gets a keep-alive."""
MAX_ENDED = 10_000
"""Number of ended episodes whose requests get status 410 instead of 401."""

_STATUS: Mapping[RefusalKind, tuple[int, str]] = {
    "context": (400, "context_length_exceeded"),
    "budget": (403, "budget_exceeded"),  # clients retry 429, and some agents 400, but the budget does not come back
    "ended": (410, "episode_ended"),
    "aborted": (503, "aborted"),
    "request": (400, "invalid_request"),
}
_PROBES = frozenset(("", "api/hello"))
_MODELS = {"object": "list", "data": [{"id": "policy", "object": "model", "created": 0, "owned_by": "envkit"}]}


class _Episode:
    def __init__(self, calls: EpisodeCalls) -> None:
        self.calls = calls
        self.open_calls = OpenCalls()
        self.has_ended = False
        responses = ResponseStore().dialect
        self.dialects = {"chat/completions": openai_chat.DIALECT, "responses": responses, "messages": MESSAGES}


class AgentProxy:
    """An ASGI application. Register an episode with `add` before its agent starts, and `end` it before it is graded.

    Args:
        keep_alive_s: Seconds without data after which a waiting stream gets a keep-alive.
        model: Answers requests with other keys, each of which counts as an episode that never ends; None refuses them.
    """

    def __init__(self, *, keep_alive_s: float = KEEP_ALIVE_S, model: EpisodeCalls | None = None) -> None:
        self._keep_alive_s = keep_alive_s
        self._model = model
        self._episodes: dict[str, _Episode] = {}
        self._ended: dict[str, None] = {}

    def add(self, calls: EpisodeCalls) -> str:
        """Register an episode; return its secret, which can be part of a URL and an API key."""
        secret = f"sk-{secrets.token_hex(16)}"
        self._episodes[secret] = _Episode(calls)
        return secret

    def end(self, secret: str) -> None:
        """End an episode: running calls are aborted, and further requests get status 410."""
        episode = self._episodes.pop(secret)
        episode.has_ended = True
        self._ended[secret] = None
        if len(self._ended) > MAX_ENDED:
            del self._ended[next(iter(self._ended))]
        episode.open_calls.end()

    async def drain(self, timeout_s: float) -> None:
        """Do nothing: the episodes have ended when the server stops."""

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close"})
        while scope["type"] == "lifespan":
            event = await receive()
            await send({"type": f"{event['type']}.complete"})
            if event["type"] == "lifespan.shutdown":
                return
        if scope["type"] != "http":
            return
        connection, episode = Connection(scope, receive, send), None
        secret, route = _address(connection.path)
        dialect = MESSAGES if route.startswith("messages") else openai_chat.DIALECT
        with suppress(ClientGoneError):
            try:
                if route in _PROBES and connection.method != "POST":
                    await connection.respond(200, {})
                    return
                episode = self._find([secret] if secret else _keys(connection.headers))
                await self._serve(episode, route, connection)
            except HttpError as error:
                await connection.fail(error.status, dialect.error(error.status, error.code, str(error)))
            except CallRefusedError as refusal:
                kind = "ended" if episode is not None and episode.has_ended else refusal.kind
                message = f"{dialect.too_long}: {refusal}" if kind == "context" else str(refusal)
                await connection.fail(_STATUS[kind][0], dialect.error(*_STATUS[kind], message))

    def _find(self, keys: Sequence[str]) -> _Episode:
        found = next((self._episodes[key] for key in keys if key in self._episodes), None)
        if found is not None:
            return found
        if any(key in self._ended for key in keys):
            raise CallRefusedError("ended", "the episode has ended")
        if self._model is not None:
            return self._episodes.setdefault(keys[0], _Episode(self._model))
        raise HttpError(
            401, "invalid_api_key", "no episode has this secret; use /e/SECRET/v1, or the secret as API key"
        )

    async def _serve(self, episode: _Episode, route: str, connection: Connection) -> None:
        match connection.method, route:
            case "GET" | "HEAD", "models":
                await connection.respond(200, _MODELS)
            case "POST", "step":
                action = _json(await connection.body()).get("action")
                if not isinstance(action, str):
                    raise refused("action is missing; send an object with a text under action")
                episode.open_calls.abort_orphans()
                await connection.respond(200, await episode.calls.step(action))
            case "POST", "messages/count_tokens":
                request = MESSAGES.read(_json(await connection.body()))
                await connection.respond(200, {"input_tokens": episode.calls.count(request)})
            case "POST", _ if route in episode.dialects:
                await self._answer(episode, route, connection, await connection.body())
            case method, _:
                raise HttpError(404, "not_found", f"no route for {method} {route}")

    async def _answer(self, episode: _Episode, route: str, connection: Connection, content: bytes) -> None:
        """Answer a request to the policy with a new call, or with that of an earlier request that this one repeats."""
        dialect, body = episode.dialects[route], _json(content)
        request, attempt = dialect.read(body), _attempt(connection.headers, route, content)
        call = episode.open_calls.find(attempt)
        is_new = call is None
        if call is None:
            call = OpenCall(secrets.token_hex(12), int(clock.wall()), episode.calls.start(request), attempt)
            episode.open_calls.add(call)
        call.clients += 1
        call.is_whole = False
        try:
            async with clock.background_tasks() as tasks:
                with anyio.CancelScope() as scope:
                    tasks.start_soon(connection.closed, scope)
                    await self._deliver(call, dialect, body, connection)
            return
        except CallRefusedError:
            episode.open_calls.remove(call)
            if is_new or episode.has_ended:
                raise
        finally:
            call.clients -= 1
        await self._answer(episode, route, connection, content)  # errors are not stored

    async def _deliver(self, call: OpenCall, dialect: Dialect, body: Body, connection: Connection) -> None:
        """Wait for the answer and send it, and report what the client received."""
        is_stream = bool(body.get("stream"))
        replies = None
        while replies is None:
            with anyio.move_on_after(self._keep_alive_s if is_stream else math.inf):
                replies = await call.replies()
            if replies is None:
                await connection.stream(dialect.keep_alive)
        answer = Answer(call.id, call.created_s, body, replies)
        characters, is_whole = [0] * len(replies), False
        try:
            if is_stream:
                for event in dialect.stream(answer):
                    await connection.stream(event.data)
                    characters[event.reply] += event.characters
            else:
                await connection.respond(200, dialect.write(answer), is_last=False)
            is_whole = call.is_whole = True
        finally:
            for index, count in enumerate(characters):
                if is_whole or count:
                    call.running.delivered(index, None if is_whole else count)
        await connection.end()


def _address(path: str) -> tuple[str, str]:
    """Return the secret in the path, or an empty text, and the route without the version of the API."""
    parts = [part for part in path.split("/") if part]
    secret = ""
    if parts[:1] == ["e"] and len(parts) > 1:
        secret, parts = parts[1], parts[2:]
    while parts[:1] == ["v1"]:  # Anthropic's clients append it to the base URL, which may already end with it
        parts = parts[1:]
    return secret, "/".join(parts)


def _keys(headers: Mapping[str, str]) -> list[str]:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return [token.strip() if scheme.lower() == "bearer" else "", headers.get("x-api-key", "")]


def _attempt(headers: Mapping[str, str], route: str, content: bytes) -> Attempt:
    count = headers.get("x-stainless-retry-count", "")
    body = blake2b(content, key=route.encode()).digest()
    return Attempt(body, headers.get("idempotency-key"), int(count[:9]) if count.isascii() and count.isdigit() else 0)


def _json(content: bytes) -> dict[str, Any]:
    try:
        body = msgspec.json.decode(content)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise refused(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise refused("the body is not an object in JSON")
    return body
