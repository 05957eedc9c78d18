"""Client of an OpenAI-compatible endpoint (vLLM, llama.cpp...): one `POST URL/chat/completions` per completion.

Requests that fail temporarily (connection, timeout, 408, 429, 5xx, a malformed completion) are retried with exponential
backoff, or after the time in ``Retry-After``. A status such as 401 or 404 is an error for the whole command. Other 4xx
are about one request, such as a prompt that is too long, except for the first request and `REFUSALS` requests in a
row. A parameter that an error names is renamed or left out; otherwise, the wording of a message decides nothing.
"""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any
from urllib.request import getproxies

import anyio
import httpx
import msgspec

from envkit.errors import UnreachableError, UsageError
from envkit.http.auth.localhost_only import is_loopback
from envkit.types import JSON, ToolSchema

_log = logging.getLogger(__name__)

API_KEY = "OPENAI_API_KEY"
CONCURRENCY = 16
REFUSALS = 5
"""Number of requests that are refused in a row, without a completion between them, that end the command."""
MAX_BYTES = 16 << 20
"""Maximum size of an answer, also after decompression."""

_MAX_DELAY_S = 60.0
_MAX_MESSAGE_CHARACTERS = 300
_MIN_KEY_CHARACTERS = 8
"""Shorter keys are placeholders, such as ``EMPTY``, and are not hidden."""
_RETRYABLE = frozenset((408, 409, 425, 429))
_REMEDIES = {
    **dict.fromkeys((401, 403), f"set {API_KEY} to a key that this server accepts"),
    404: "check the URL (is /v1 missing?) and the name of the model",
    **dict.fromkeys((402, 405, 407, 410, 415, 426), "the server rejects this request"),
}
"""Statuses that are never about one request, with what to do."""
_REPLACEMENTS: Mapping[str, str | None] = {"max_tokens": "max_completion_tokens", "seed": None, "temperature": None}
"""Parameters that some models refuse, with the names to send instead; None: leave it out."""
_PARAMETER = re.compile(rf"(?<![\w-])({'|'.join(_REPLACEMENTS)})(?![\w-])")


class NoReplyError(Exception):
    """All tries of a request failed."""


class RequestRefusedError(Exception):
    """The server refuses this request, for example because the chat is too long, or because of a content filter."""


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
    choices: Annotated[tuple[ChoiceReply, ...], msgspec.Meta(min_length=1)]
    usage: _UsageReply | None = None


_COMPLETION = msgspec.json.Decoder(CompletionReply)


@dataclass(slots=True)
class Address:
    """A model on a server.

    Attributes:
        model: Name of the model on the server.
        url: Base URL, without ``/chat/completions``. It may change; the next request is sent to the new one.
        is_own: Whether it is a server of this run, which gets no key and is never asked through a proxy.
    """

    model: str
    url: str
    is_own: bool = False

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
        api_key: The API key, to hide it in texts of the server; may be empty.
        timeout_s: Maximum seconds for one answer.
        tries: Maximum number of requests for one completion.
        delay_s: Seconds before the first retry; doubles with each retry, up to `_MAX_DELAY_S`.
        parameters: Further parameters of each request; None leaves a parameter out.
        uses_proxy: Whether the environment variables name a proxy, for errors.
        retries: Number of requests that repeated one that had failed temporarily.
        retry_cause: Why the last one of them had failed; empty without retries.
        notes: What users should know about the requests: parameters that were replaced, for example.
    """

    http: httpx.AsyncClient
    address: Address
    api_key: str = ""
    timeout_s: float = 600.0
    tries: int = 5
    delay_s: float = 1.0
    parameters: Mapping[str, JSON] = field(default_factory=dict)
    uses_proxy: bool = False
    retries: int = field(default=0, init=False)
    retry_cause: str = field(default="", init=False)
    notes: list[str] = field(default_factory=list, init=False)
    _has_asked: bool = field(default=False, init=False)
    _has_answered: bool = field(default=False, init=False)
    _has_completed: bool = field(default=False, init=False)
    _refusals: int = field(default=0, init=False)
    _replaced: Mapping[str, str | None] = field(default_factory=dict, init=False)

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
            RequestRefusedError: The server refuses this request.
            UsageError: The server rejects the first request, several requests in a row, or all requests.
            UnreachableError: The server is not reachable.
        """
        own = {
            "model": self.address.model,
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "seed": seed,
            "tools": tools or None,
        }
        replaced, is_first, self._has_asked = self._replaced, not self._has_asked, True
        failure, delay_s, is_retry = "", 0.0, False
        for number in range(self.tries):
            await anyio.sleep(delay_s)
            if is_retry:
                self.retries, self.retry_cause = self.retries + 1, failure
            is_retry = True
            delay_s = min(self.delay_s * 2**number, _MAX_DELAY_S)
            sent = {replaced.get(name, name): value for name, value in own.items()}
            sent.update(self.parameters)
            try:
                response = await self._post({name: value for name, value in sent.items() if name and value is not None})
                self._has_answered = True
                if response.is_success:
                    return self._accepted(_COMPLETION.decode(response.content), replaced)
            except httpx.ConnectError as error:
                failure = self._hidden(_reason(error))
                if not self._has_answered:
                    remedy = ", or the proxy in the environment variables" if self.uses_proxy else ""
                    raise UnreachableError(
                        f"no server answers at {self.address.url} ({failure}); start one, or check the URL{remedy}"
                    ) from None
            except (httpx.RequestError, msgspec.MsgspecError) as error:
                failure = self._hidden(_reason(error))
            else:
                message, named = _error_of(response)
                status = f"{response.status_code} {response.reason_phrase}".strip()
                failure = self._hidden(f"{status}: {message}")
                found = _PARAMETER.findall(named) if response.status_code in (400, 422) else ()
                name = next((one for one in found if one not in {**replaced, **self.parameters}), None)
                if name is not None:
                    replaced, delay_s, is_retry = {**replaced, name: _REPLACEMENTS[name]}, 0.0, False
                elif response.status_code in _RETRYABLE or response.status_code >= 500:
                    delay_s = _retry_after(response, otherwise=delay_s)
                else:
                    raise self._refusal(response.status_code, failure, is_first=is_first)
        raise NoReplyError(f"no completion from {self.address.url} in {self.tries} tries: {failure}")

    def note(self, line: str) -> None:
        """Add a line to `notes`, and warn of it in the log, if it is not there yet."""
        if line not in self.notes:
            self.notes.append(line)
            _log.warning(line)

    async def _post(self, body: Mapping[str, Any]) -> httpx.Response:
        """Send a request and return the whole response, of at most `MAX_BYTES`, without the API key in its content."""
        try:
            with anyio.fail_after(self.timeout_s):
                async with self.http.stream("POST", f"{self.address.url}/chat/completions", json=body) as response:
                    content = await _content(response)
        except TimeoutError:
            raise httpx.ReadTimeout(f"no complete answer in {self.timeout_s:g} s") from None
        if len(self.api_key) >= _MIN_KEY_CHARACTERS:
            content = content.replace(self.api_key.encode(), b"***")
        return httpx.Response(
            response.status_code,
            headers=[(name, value) for name, value in response.headers.items() if name == "retry-after"],
            content=content,
            extensions=response.extensions,
        )

    def _accepted(self, completion: CompletionReply, replaced: Mapping[str, str | None]) -> CompletionReply:
        """Note that the server has completed a request in which parameters were replaced as `replaced` says."""
        for name in replaced.keys() - self._replaced.keys():
            what = f"sent as {replaced[name]}" if replaced[name] else "left out"
            self.note(f"{self.address.model} refuses the parameter {name}, which is {what}")
        self._replaced = {**self._replaced, **replaced}
        self._has_completed, self._refusals = True, 0
        if completion.choices[0].finish_reason == "content_filter":
            raise RequestRefusedError("finish_reason content_filter")
        return completion

    def _refusal(self, status: int, failure: str, *, is_first: bool) -> RequestRefusedError | UsageError:
        """Return the error of a request that failed permanently."""
        self._refusals += 1
        is_of_one = 400 <= status < 500 and status not in _REMEDIES and (self._has_completed or not is_first)
        if is_of_one and self._refusals < REFUSALS:
            return RequestRefusedError(failure)
        in_a_row = f"the server has rejected {self._refusals} requests in a row"
        remedy = _REMEDIES.get(status, in_a_row if is_of_one else "the server rejects this request")
        url = f"{self.address.url}/chat/completions"
        return UsageError(f"POST {url} for model {self.address.model}: {failure}; {remedy}")

    def _hidden(self, text: str) -> str:
        """Return `text` without the API key."""
        return text.replace(self.api_key, "***") if len(self.api_key) >= _MIN_KEY_CHARACTERS else text


@asynccontextmanager
async def open_client(
    address: Address, *, api_key: str | None, timeout_s: float = 600.0, concurrency: int = CONCURRENCY
) -> AsyncIterator[ChatClient]:
    """Open a client that asks the model at `address`. A server on this machine is never asked through a proxy.

    Args:
        address: The model and its server.
        api_key: Key to send as a bearer token; None sends no token.
        timeout_s: Maximum seconds for one answer, after which the request fails.
        concurrency: Maximum number of connections.

    Raises:
        UsageError: The key cannot be sent, or the proxy of the environment variables cannot be used.
    """
    key = "" if address.is_own else (api_key or "").strip()
    if not (key.isascii() and key.isprintable()):
        raise UsageError(f"{API_KEY}: contains characters that no API key has; set it again")
    headers = {"Accept-Encoding": "gzip", **({"Authorization": f"Bearer {key}"} if key else {})}
    limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
    timeout = httpx.Timeout(timeout_s, connect=min(timeout_s, 20.0))
    url = httpx.URL(address.url)
    uses_proxy = not (address.is_own or is_loopback(url.host) or url.host == "0.0.0.0")
    direct = None if uses_proxy else httpx.AsyncHTTPTransport(limits=limits)
    try:
        http = httpx.AsyncClient(headers=headers, timeout=timeout, limits=limits, transport=direct)
    except (ImportError, ValueError, httpx.InvalidURL) as error:
        reason = f"the proxy in the environment variables (HTTPS_PROXY, ALL_PROXY) cannot be used: {error}"
        raise UsageError(f"{reason}; unset them, or set NO_PROXY={url.host}") from None
    async with http:
        yield ChatClient(http, address, key, timeout_s, uses_proxy=uses_proxy and bool(getproxies()))


async def _content(response: httpx.Response) -> bytes:
    """Return the decompressed body of a response; raise `DecodingError` above `MAX_BYTES`, or if it is damaged."""
    content = bytearray()
    async for chunk in response.aiter_bytes():
        content += chunk
        if len(content) > MAX_BYTES:
            raise httpx.DecodingError(f"the response is larger than {MAX_BYTES} bytes")
    return bytes(content)


def _error_of(response: httpx.Response) -> tuple[str, str]:
    """Return the server's error message on one line, and a text with the names of the parameters that it refuses."""
    try:
        body = msgspec.json.decode(response.content)
    except msgspec.MsgspecError:
        body = None
    error = body.get("error", body) if isinstance(body, dict) else None
    error = error if isinstance(error, dict) else {"message": error}
    message, details = error.get("message"), error.get("detail")
    text = message if isinstance(message, str) else response.text
    places = [one.get("loc") for one in details if isinstance(one, dict)] if isinstance(details, list) else text
    return " ".join(text.split())[:_MAX_MESSAGE_CHARACTERS] or "no message", f"{error.get('param')} {places}"


def _reason(error: Exception) -> str:
    if not isinstance(error, httpx.RequestError):
        return f"the response is not a chat completion ({error})"
    kind = "timeout" if isinstance(error, httpx.TimeoutException) else type(error).__name__
    return str(error) or kind


def _retry_after(response: httpx.Response, *, otherwise: float) -> float:
    """Return the seconds in the header ``Retry-After``, up to `_MAX_DELAY_S`; `otherwise` without them."""
    try:
        return min(max(0.0, float(response.headers.get("Retry-After", ""))), _MAX_DELAY_S)
    except ValueError:  # it may also be a date
        return otherwise
