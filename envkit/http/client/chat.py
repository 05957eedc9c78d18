"""Client of an OpenAI-compatible endpoint (vLLM, llama.cpp...): one `POST URL/chat/completions` per completion.

Requests that fail temporarily (connection, timeout, 408, 429, 5xx, a malformed completion) are retried with exponential
backoff, or after the time in ``Retry-After``. Permanent failures (401, 404, a rejected parameter) are errors with the
server's message.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any

import anyio
import httpx
import msgspec

from envkit import clock
from envkit.errors import UnreachableError, UsageError
from envkit.types import ToolSchema

API_KEY = "OPENAI_API_KEY"
CONCURRENCY = 16

_MAX_DELAY_S = 60.0
_MAX_MESSAGE_CHARACTERS = 300
_RETRYABLE = frozenset((408, 409, 425, 429))
_TOO_LONG = re.compile(r"context[ _](length|size|window)|too many tokens|prompt is too long", re.IGNORECASE)


class NoReplyError(Exception):
    """All tries of a request failed."""


class ChatTooLongError(Exception):
    """The chat does not fit into the model's context."""


class FunctionReply(msgspec.Struct):
    name: str
    arguments: str | None = None


class ToolCallReply(msgspec.Struct):
    function: FunctionReply
    id: str | None = None


class MessageReply(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # the name of `reasoning_content` in vLLM and OpenRouter
    tool_calls: tuple[ToolCallReply, ...] | None = None


class ChoiceReply(msgspec.Struct):
    message: MessageReply
    finish_reason: str | None = None


class _UsageReply(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class CompletionReply(msgspec.Struct):
    choices: tuple[ChoiceReply, ...]
    usage: _UsageReply | None = None


_COMPLETION = msgspec.json.Decoder(CompletionReply)


@dataclass(frozen=True, slots=True)
class Address:
    """A model on a server.

    Attributes:
        model: Name of the model on the server.
        url: Base URL, without ``/chat/completions``.
    """

    model: str
    url: str

    @classmethod
    def of(cls, text: str, setting: str = "--policy", prefix: str = "openai:") -> Address:
        """Read ``MODEL@URL``; a URL without a path gets ``/v1``.

        Args:
            text: The address.
            setting: Name of the setting that holds the address, for errors.
            prefix: What the setting has before the address, for errors.

        Raises:
            UsageError: `text` has another form, or its URL contains a password.
        """
        found = re.fullmatch(r"(?P<model>.+?)@(?P<url>https?://.+)", text)
        try:
            url = httpx.URL(found["url"]) if found else None
        except httpx.InvalidURL:
            url = None
        if found is None or url is None or not url.host:
            form = f"{prefix}MODEL@URL, such as {prefix}qwen2.5-7b@http://127.0.0.1:8000/v1"
            shown = f"{setting} {prefix}{text}" if prefix else f"{setting}: {text}"
            raise UsageError(f"{shown}: lacks the model or the URL of a server; write {form}")
        if url.userinfo:
            raise UsageError(f"{setting}: the URL of {found['model']} holds a password; set {API_KEY} instead")
        path = url.path.rstrip("/").removesuffix("/chat/completions") or "/v1"
        return cls(found["model"], str(url.copy_with(path=path)))


@dataclass(slots=True)
class ChatClient:
    """Asks a model behind an endpoint.

    Attributes:
        http: HTTP client that sends the requests with the API key.
        address: The model and its server.
        tries: Maximum number of requests for one completion.
        delay_s: Seconds before the first retry; doubles with each retry, up to `_MAX_DELAY_S`.
    """

    http: httpx.AsyncClient
    address: Address
    tries: int = 5
    delay_s: float = 1.0
    _has_answered: bool = field(default=False, init=False)

    async def complete(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        max_tokens: int,
        temperature: float,
        seed: int,
        tools: Sequence[ToolSchema] = (),
    ) -> CompletionReply:
        """Return the model's completion of the chat `messages`, which has at least one choice.

        Raises:
            NoReplyError: All tries failed.
            ChatTooLongError: The chat does not fit into the model's context.
            UsageError: The server rejects the request permanently.
            UnreachableError: The server is not reachable.
        """
        body = {
            "model": self.address.model,
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "n": 1,
            "seed": seed,
            **({"tools": tools} if tools else {}),
        }
        failure, delay_s = "", 0.0
        for number in range(self.tries):
            await anyio.sleep(delay_s)
            delay_s = min(self.delay_s * 2**number, _MAX_DELAY_S)
            try:
                response = await self.http.post(f"{self.address.url}/chat/completions", json=body)
                self._has_answered = True
                completion = self._read(response)
            except httpx.ConnectError as error:
                if not self._has_answered:
                    raise UnreachableError(
                        f"no server answers at {self.address.url} ({_reason(error)}); start one, or check the URL"
                    ) from error
                failure = _reason(error)
            except httpx.TransportError as error:
                failure = _reason(error)
            except msgspec.MsgspecError as error:
                failure = f"the response is not a chat completion ({error})"
            else:
                if isinstance(completion, CompletionReply):
                    return completion
                failure, delay_s = completion, _retry_after(response, otherwise=delay_s)
        raise NoReplyError(f"no completion from {self.address.url} in {self.tries} tries: {failure}")

    def _read(self, response: httpx.Response) -> CompletionReply | str:
        """Return the completion, or why the request failed temporarily; raise an error if it failed permanently."""
        if response.is_success:
            completion = _COMPLETION.decode(response.content)
            return completion if completion.choices else "the response has no choices"
        status = f"{response.status_code} {response.reason_phrase}".strip()
        reason = f"{status}: {_message(response)}"
        if response.status_code in _RETRYABLE or response.status_code >= 500:
            return reason
        failure = f"POST {response.request.url} for model {self.address.model}: {reason}"
        if response.status_code in (401, 403):
            raise UsageError(f"{failure}; set {API_KEY} to a key that this server accepts")
        if response.status_code == 404:
            raise UsageError(f"{failure}; check the URL (is /v1 missing?) and the name of the model")
        if response.status_code in (400, 413) and _TOO_LONG.search(response.text):
            raise ChatTooLongError(reason)
        raise UsageError(f"{failure}; the server rejects this request")


@asynccontextmanager
async def open_client(
    address: Address, *, api_key: str | None, timeout_s: float = 600.0, concurrency: int = CONCURRENCY
) -> AsyncIterator[ChatClient]:
    """Open a client that asks the model at `address`.

    Args:
        address: The model and its server.
        api_key: Key to send as a bearer token; None sends no token.
        timeout_s: Seconds without a received byte after which a request fails.
        concurrency: Maximum number of connections.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
    timeout = httpx.Timeout(timeout_s, connect=min(timeout_s, 20.0))
    async with httpx.AsyncClient(headers=headers, timeout=timeout, limits=limits) as http:
        yield ChatClient(http, address)


def _message(response: httpx.Response) -> str:
    """Return the server's error message on one line."""
    try:
        body = msgspec.json.decode(response.content)
    except msgspec.MsgspecError:
        body = None
    error = body.get("error", body) if isinstance(body, dict) else None
    text = error.get("message") if isinstance(error, dict) else error
    text = text if isinstance(text, str) else response.text
    return " ".join(text.split())[:_MAX_MESSAGE_CHARACTERS] or "no message"


def _reason(error: httpx.TransportError) -> str:
    kind = "timeout" if isinstance(error, httpx.TimeoutException) else type(error).__name__
    return str(error) or kind


def _retry_after(response: httpx.Response, *, otherwise: float) -> float:
    """Return the seconds of the ``Retry-After`` header, up to `_MAX_DELAY_S`; `otherwise` without a valid header."""
    text = response.headers.get("Retry-After", "")
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(text).timestamp() - clock.wall()
        except ValueError:
            return otherwise
    return min(max(0.0, seconds), _MAX_DELAY_S)
