"""A player that asks an OpenAI-compatible endpoint (vLLM, llama.cpp...): one `POST URL/chat/completions` per turn.

Requests that fail temporarily (connection, timeout, 408, 429, 5xx, a malformed completion) are retried with exponential
backoff, or after the time in ``Retry-After``. If the last try fails, the episode is void. Permanent failures (401, 404,
a rejected parameter) end the evaluation with the server's message.
"""

from __future__ import annotations

import random
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime

import anyio
import httpx
import msgspec

from envkit import clock
from envkit.errors import EnvkitError, UnreachableError, UsageError
from envkit.protocols import EpisodePlayer
from envkit.trainer_bridge.thoughts import without_thoughts
from envkit.types import FinishReason, GenerationRecord, Observation, Reset, Task
from envkit.wiring.evaluation.players import NoCompletionError, Playing, PromptTooLongError

API_KEY = "OPENAI_API_KEY"
CONCURRENCY = 16
TURN_TOKENS = 128
MAX_TURNS = 16

_FORM = "openai:MODEL@URL, such as openai:qwen2.5-7b@http://127.0.0.1:8000/v1"
_MAX_DELAY_S = 60.0
_MAX_MESSAGE_CHARACTERS = 300
_RETRYABLE = frozenset((408, 409, 425, 429))
_TOO_LONG = re.compile(r"context[ _](length|size|window)|too many tokens|prompt is too long", re.IGNORECASE)


class _MessageReply(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # the name of `reasoning_content` in vLLM and OpenRouter


class _Choice(msgspec.Struct):
    message: _MessageReply
    finish_reason: str | None = None


class _UsageReply(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _CompletionReply(msgspec.Struct):
    choices: tuple[_Choice, ...]
    usage: _UsageReply | None = None


_COMPLETION = msgspec.json.Decoder(_CompletionReply)


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
    def of(cls, text: str) -> Address:
        """Read ``MODEL@URL``; a URL without a path gets ``/v1``.

        Raises:
            UsageError: `text` has another form, or its URL contains a password.
        """
        found = re.fullmatch(r"(?P<model>.+?)@(?P<url>https?://.+)", text)
        try:
            url = httpx.URL(found["url"]) if found else None
        except httpx.InvalidURL:
            url = None
        if found is None or url is None or not url.host:
            raise UsageError(f"--policy openai:{text}: lacks the model or the URL of a server; write {_FORM}")
        if url.userinfo:
            raise UsageError(f"--policy: the URL of {found['model']} holds a password; set {API_KEY} instead")
        path = url.path.rstrip("/").removesuffix("/chat/completions") or "/v1"
        return cls(found["model"], str(url.copy_with(path=path)))


@dataclass(slots=True)
class Endpoint:
    """A player that asks a model behind an endpoint; see `envkit.protocols.Player`.

    Attributes:
        client: HTTP client that sends the requests with the API key.
        address: The model and its server.
        playing: System prompt, limits and sampling.
        tries: Maximum number of requests for one completion; if all fail, the episode is void.
        delay_s: Seconds before the first retry; doubles with each retry, up to `_MAX_DELAY_S`.
        give_up_after: Number of consecutive void episodes after which the evaluation ends with an error.
    """

    client: httpx.AsyncClient
    address: Address
    playing: Playing
    tries: int = 5
    delay_s: float = 1.0
    give_up_after: int = CONCURRENCY
    _has_answered: bool = field(default=False, init=False)
    _void_in_a_row: int = field(default=0, init=False)

    def begin(self, task: Task, start: Reset, rng: random.Random) -> EpisodePlayer:
        return _Chat(self, rng)

    async def complete(self, messages: list[dict[str, str]], seed: int) -> _CompletionReply:
        """Return the model's completion of the chat `messages`.

        Raises:
            NoCompletionError: All tries failed.
            PromptTooLongError: The chat does not fit into the model's context.
            UsageError: The server rejects the request permanently.
            EnvkitError: The server is not reachable, or stopped answering.
        """
        temperature = 1.0 if self.playing.temperature is None else self.playing.temperature
        body = {
            "model": self.address.model,
            "messages": messages,
            "max_tokens": self.playing.turn_tokens or TURN_TOKENS,
            "temperature": temperature,
            "n": 1,
            "seed": seed,
        }
        failure, delay_s = "", 0.0
        for number in range(self.tries):
            await anyio.sleep(delay_s)
            delay_s = min(self.delay_s * 2**number, _MAX_DELAY_S)
            try:
                response = await self.client.post(f"{self.address.url}/chat/completions", json=body)
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
                if isinstance(completion, _CompletionReply):
                    self._void_in_a_row = 0
                    return completion
                failure, delay_s = completion, _retry_after(response, otherwise=delay_s)
        self._void_in_a_row += 1
        lost = f"no completion from {self.address.url} in {self.tries} tries: {failure}"
        if self._void_in_a_row >= self.give_up_after:
            raise EnvkitError(f"{self._void_in_a_row} episodes in a row had {lost}; check the server")
        raise NoCompletionError(lost)

    def _read(self, response: httpx.Response) -> _CompletionReply | str:
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
            raise PromptTooLongError(reason)
        raise UsageError(f"{failure}; the server rejects this request")


@asynccontextmanager
async def open_endpoint(
    address: Address, playing: Playing, *, api_key: str | None, timeout_s: float = 600.0
) -> AsyncIterator[Endpoint]:
    """Open a player that asks the model at `address`.

    Args:
        address: The model and its server.
        playing: System prompt, limits and sampling.
        api_key: Key to send as a bearer token; None sends no token.
        timeout_s: Seconds without a received byte after which a request fails.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    at_once = playing.concurrency or CONCURRENCY
    limits = httpx.Limits(max_connections=at_once, max_keepalive_connections=at_once)
    timeout = httpx.Timeout(timeout_s, connect=min(timeout_s, 20.0))
    async with httpx.AsyncClient(headers=headers, timeout=timeout, limits=limits) as client:
        yield Endpoint(client, address, playing, give_up_after=at_once)


@dataclass(slots=True)
class _Chat:
    """One episode: a chat that grows by one observation and one answer per turn."""

    endpoint: Endpoint
    rng: random.Random
    turns: list[tuple[str, str]] = field(default_factory=list)  # observations and answers
    generation: GenerationRecord | None = None

    async def act(self, observation: Observation) -> str:
        playing = self.endpoint.playing
        began = clock.precise()
        reply = await self.endpoint.complete(self._messages(observation.text), self.rng.getrandbits(31))
        message = reply.choices[0].message
        thoughts = message.reasoning_content or message.reasoning
        content = message.content or ""
        completion = f"<think>{thoughts}</think>{content}" if thoughts else content
        action = without_thoughts(completion)
        is_cut = reply.choices[0].finish_reason == "length"
        self.generation = GenerationRecord(
            prompt=observation.text,
            completion=completion,
            finish=FinishReason.LENGTH if is_cut else FinishReason.STOP,
            prompt_ids=(),
            completion_ids=(),
            logprobs=(),
            versions=(),
            seconds=clock.precise() - began,
            usage=(reply.usage.prompt_tokens, reply.usage.completion_tokens) if reply.usage else (0, 0),
        )
        self.turns.append((observation.text, completion if playing.thinking == "keep" else action))
        return action

    def _messages(self, observation: str) -> list[dict[str, str]]:
        playing = self.endpoint.playing
        limit = playing.history
        before = len(self.turns) if limit is None or limit == "all" else min(len(self.turns), limit - 1)
        kept = self.turns[len(self.turns) - before :]
        messages = [] if playing.system is None else [{"role": "system", "content": playing.system}]
        for earlier, answer in kept:
            messages += [{"role": "user", "content": earlier}, {"role": "assistant", "content": answer}]
        return [*messages, {"role": "user", "content": observation}]


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
