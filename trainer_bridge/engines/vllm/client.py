"""The HTTP routes of one vLLM server that the engine uses.

Routes and bodies: vLLM 0.32.0. Those that pause and load weights exist only in a server with `VLLM_SERVER_DEV_MODE=1`.
"""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio
import httpx
import orjson

from envkit import clock
from envkit.errors import DeadlineError, UsageError
from envkit.types import JSON, SamplingParams, Weights

from .plugin.envkit_fetch import PATH as _FETCH

_REQUEST_PREFIX = "generate-tokens-"
"""vLLM puts this before the id of a request; `abort` needs the whole id."""
_ADAPTER = "policy"
_LOAD_ADAPTER = "/v1/load_lora_adapter"
_LOAD_TIMEOUT_S = 600.0
_CALL_TIMEOUT_S = 60.0
_MAX_SEED = 1 << 63
_FULL = "-full"
"""End of the label of a server that has received all weights, and no longer has those that it started with."""
_DTYPE = re.compile(r"\bdtype=torch\.(\w+)")
UNKNOWN = "default"
"""Label of the weights of a server that has just started."""
_UNAVAILABLE = 500
_FED_TOKENS = {"vllm:prompt_tokens_total": 1, "vllm:generation_tokens_total": 1, "vllm:prefix_cache_hits_total": -1}
"""vLLM's metrics that count tokens, and their signs in the number of those that the model has processed."""
_REQUESTS = {"vllm:num_requests_running": 1, "vllm:num_requests_waiting": 1}


class ServerLostError(Exception):
    """The server does not answer, or its engine has failed. The message is the reason."""


@dataclass(slots=True)
class Part:
    """The output of a server so far for one request.

    Attributes:
        logprobs: Log-probabilities of the tokens in nats.
        finish: ``"stop"``, ``"length"`` or ``"abort"``; None while tokens may follow.
        versions: Labels of the weights that sampled the tokens; known at the end.
        began_s: Time of the first token.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: str | None = None
    versions: list[str] = field(default_factory=list)
    began_s: float = math.inf

    @property
    def generated_s(self) -> float:
        """Seconds since the first token; 0 before."""
        return max(0.0, clock.now() - self.began_s)


class VllmClient:
    """Calls the server at `url`, which is lost if it sends no token of a completion for `stall_timeout_s` seconds."""

    def __init__(self, url: str, *, stall_timeout_s: float) -> None:
        self.url = url.rstrip("/")
        self.model = ""
        self._base = ""
        self._generate_url = httpx.URL(f"{self.url}/inference/v1/generate")  # httpx joins URLs slowly
        self._token = secrets.token_hex(4)
        self._is_full = False
        self._stall_timeout_s = stall_timeout_s
        self._last_s = clock.now()
        # The server closes a connection after an error, and a request on it at that moment would be lost. And httpx is
        # slow if many connections are idle.
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers={"connection": "close"},
            limits=httpx.Limits(max_connections=None),
            timeout=httpx.Timeout(_CALL_TIMEOUT_S, read=stall_timeout_s),
            trust_env=False,
        )

    async def close(self) -> None:
        """Close all connections. Requests in progress raise `ServerLostError`."""
        await self._http.aclose()

    def label(self, version: int) -> str:
        """Return the label of a version, which no other client of the server uses."""
        return f"{self._token}-{version}{_FULL if self._is_full else ''}"

    async def connect(self, *, max_tokens: int, dtype: str, takes_adapters: bool) -> None:
        """Prepare the server for `generate` and `load`. Its present weights get the label of version 0.

        Raises:
            ServerLostError: It does not answer.
            UsageError: It takes fewer than `max_tokens` tokens, has another number format, was not started with
                envkit's arguments, has the weights of another run, or takes no adapters although it should.
        """
        try:
            (model, *_) = (await self._call("GET", "/v1/models")).json()["data"]
            self._base, limit = str(model["id"]), int(model["max_model_len"])
            self._is_full = str((await self._call("GET", "/weight_info")).json()["weight_version"]).endswith(_FULL)
            found = _DTYPE.search((await self._call("GET", "/server_info")).json()["vllm_config"])
        except (KeyError, TypeError, ValueError, UsageError) as error:
            raise UsageError(f"{self.url} is not a vLLM server for envkit; start one with `envkit vllm`") from error
        self.model = self._base
        if found is not None and found[1] != dtype:
            raise UsageError(
                f"the vLLM server {self.url} has weights in {found[1]}, and engine.dtype is {dtype}; change one of them"
            )
        if takes_adapters and await self._lacks(_LOAD_ADAPTER):
            raise UsageError(
                f"the vLLM server {self.url} takes no LoRA adapters; start it with --lora-rank RANK, where RANK is at "
                "least trainer.lora.rank"
            )
        if takes_adapters and self._is_full:
            raise UsageError(
                f"the vLLM server {self.url} has the weights of another run, to which no LoRA adapter must be added; "
                "start it again"
            )
        if limit < max_tokens:
            raise UsageError(
                f"the vLLM server {self.url} takes {limit} tokens, and rollout.max_tokens is {max_tokens}; "
                f"start it with --max-tokens {max_tokens}"
            )
        try:
            await self._call("POST", "/init_weight_transfer_engine", {"init_info": {}})
            await self._call("POST", "/resume")  # a run that was killed in a push has left the server paused
            await self._set_label(0)
        except UsageError as error:
            advice = "start it with `envkit vllm`, so that it can load weights"
            raise UsageError(f"the vLLM server {self.url} cannot be prepared: {error.detail}; {advice}") from error

    async def is_healthy(self) -> bool:
        """Whether the server answers. It also answers while its worker hangs."""
        try:
            return (await self._http.get("/health", timeout=_CALL_TIMEOUT_S)).status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    async def _lacks(self, path: str) -> bool:
        """Whether the server has no POST route at `path`. If it has one, it answers a GET request with 405."""
        try:
            return (await self._http.get(path, timeout=_CALL_TIMEOUT_S)).status_code == httpx.codes.NOT_FOUND
        except httpx.HTTPError as error:
            raise ServerLostError(_reason(error)) from error

    async def generate(
        self,
        request_id: str,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        max_tokens: int,
        seed: int | None,
        generated_s: float,
        into: Part,
    ) -> None:
        """Complete `prompt`; `into` receives the tokens as they arrive, so they survive an error or a cancellation.

        Closing the connection, as a cancellation does, ends the generation in the server.

        A request that gets nothing for too long, while others do, ends with the finish reason ``"abort"``: it waits for
        its turn in the server, or was lost there.

        Args:
            request_id: Unique id.
            prompt: Tokens of the prompt, and of the completion so far.
            params: Sampling parameters of the whole completion.
            max_tokens: Maximum number of tokens still to sample.
            seed: Random seed; None leaves it to the server.
            generated_s: Seconds of `params.timeout_s` that earlier parts of the completion have taken.
            into: Receives the tokens.

        Raises:
            DeadlineError: The completion took longer than `params.timeout_s`.
            ServerLostError: The server was lost, or sent nothing to any request for too long.
            UsageError: The server rejected the request.
        """
        sampling: dict[str, JSON] = {
            "max_tokens": max_tokens,
            "temperature": params.temperature,
            **({} if seed is None else {"seed": seed % _MAX_SEED}),
            "logprobs": 0,
            "ignore_eos": True,
            "stop_token_ids": list(params.stop),
        }
        body = {
            "model": self.model,
            "request_id": request_id,
            "token_ids": prompt,
            "sampling_params": sampling,
            "stream": True,
        }
        headers = {"content-type": "application/json"}
        self._check_open()
        try:
            with anyio.CancelScope() as scope:
                async with self._http.stream(
                    "POST", self._generate_url, content=orjson.dumps(body), headers=headers
                ) as reply:
                    if reply.status_code != httpx.codes.OK:
                        self._refuse(reply.status_code, await reply.aread())
                    rest = b""
                    async for content in reply.aiter_raw():
                        *lines, rest = (rest + content).split(b"\n")
                        for line in lines:
                            if line.startswith(b"data: {"):
                                self._read(orjson.loads(line[6:]), into)
                        if into.tokens and scope.deadline == math.inf:
                            scope.deadline = anyio.current_time() + params.timeout_s - generated_s
            if scope.cancelled_caught and into.finish is None:
                limit = params.timeout_s
                raise DeadlineError(f"the engine did not complete a prompt within {limit:g} s of its first token")
        except httpx.ReadTimeout as error:
            if clock.now() - self._last_s < self._stall_timeout_s:
                into.finish = "abort"
                return
            raise ServerLostError(f"no token within {self._stall_timeout_s:g} s") from error
        except httpx.HTTPError as error:
            raise ServerLostError(_reason(error)) from error
        if into.finish is None:
            raise ServerLostError("the connection was closed in the middle of a completion")

    def _read(self, chunk: Mapping[str, Any], into: Part) -> None:
        if "error" in chunk:
            self._refuse(int(chunk["error"].get("code") or _UNAVAILABLE), orjson.dumps(chunk))
        self._last_s = clock.now()
        for choice in chunk.get("choices") or ():
            into.tokens += choice["token_ids"] or ()
            into.logprobs += [one["logprob"] for one in (choice["logprobs"] or {}).get("content") or ()]
            into.versions += [one["version"] for one in choice["weight_versions"] or ()]
            into.finish = choice["finish_reason"] or into.finish
        if into.tokens:
            into.began_s = min(into.began_s, clock.now())

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End requests. Their `generate` returns the tokens so far, with the finish reason ``"abort"``."""
        await self._call("POST", "/abort_requests", {"request_ids": [*map(_REQUEST_PREFIX.__add__, request_ids)]})

    async def fetch(self, url: str) -> str:
        """Let the server fetch the weights at `url`, while it generates; return their path on its machine.

        If it fails, it tries once more: then it fetches all of a file that was damaged.

        Raises:
            ServerLostError: The server was lost.
            UsageError: The server cannot fetch them; it still has its old weights.
        """
        if await self._lacks(_FETCH):
            raise UsageError(
                f"the vLLM server {self.url} cannot fetch weights; start it with this version of `envkit vllm`, or set "
                "engine.weights_folder"
            )
        try:
            found = await self._call("POST", _FETCH, {"url": url}, is_load=True)
        except UsageError:
            found = await self._call("POST", _FETCH, {"url": url}, is_load=True)
        return str(found.json()["path"])

    async def load(self, weights: Weights) -> None:
        """Load weights or an adapter, and drop the prefix cache. No request may be in progress.

        Raises:
            ServerLostError: The server was lost.
            UsageError: The server cannot load them; it still has its old weights.
        """
        # A pause clears the prefix cache, which would otherwise survive the update.
        await self._call("POST", "/pause?mode=abort")
        try:
            if weights.adapter:
                adapter: JSON = {"lora_name": _ADAPTER, "lora_path": weights.location, "load_inplace": True}
                await self._call("POST", _LOAD_ADAPTER, adapter)
                await self._set_label(weights.version)
                self.model = _ADAPTER
            else:
                try:
                    await self._call("POST", "/start_weight_update")
                except ServerLostError:  # a run that was killed in a push may have left its update open
                    await self._call("POST", "/finish_weight_update", {})
                    await self._call("POST", "/start_weight_update")
                await self._call("POST", "/update_weights", {"update_info": {"path": weights.location}}, is_load=True)
                self._is_full = True
                await self._call("POST", "/finish_weight_update", {"weight_version": self.label(weights.version)})
                self.model = self._base
        except UsageError as error:
            if not await self.is_healthy():  # its engine died
                raise ServerLostError(error.detail) from error
            raise
        finally:
            with anyio.CancelScope(shield=True):  # a server that stays paused would never answer
                await self._call("POST", "/resume")

    async def fed_tokens(self) -> int:
        """Return the number of tokens that the model has processed, without those from the prefix cache."""
        return await self._sum(_FED_TOKENS)

    async def is_busy(self) -> bool:
        """Whether it has requests."""
        return await self._sum(_REQUESTS) > 0

    async def _sum(self, signs: Mapping[str, int]) -> int:
        """Return the sum of some of vLLM's metrics, each with its sign."""
        found = 0.0
        for line in (await self._call("GET", "/metrics")).text.splitlines():
            name, _, value = line.rpartition(" ")
            if sign := signs.get(name.partition("{")[0]):
                found += sign * float(value)
        return round(found)

    async def _set_label(self, version: int) -> None:
        await self._call("POST", "/update_weight_version", {"new_version": self.label(version)})

    async def _call(self, method: str, path: str, body: JSON = None, *, is_load: bool = False) -> httpx.Response:
        self._check_open()
        try:
            reply = await self._http.request(
                method,
                path,
                json=body,
                timeout=_LOAD_TIMEOUT_S if is_load else _CALL_TIMEOUT_S,
            )
        except httpx.HTTPError as error:
            raise ServerLostError(_reason(error)) from error
        if reply.status_code >= httpx.codes.BAD_REQUEST:
            self._refuse(reply.status_code, reply.content, is_load=is_load)
        return reply

    def _check_open(self) -> None:
        if self._http.is_closed:
            raise ServerLostError("the connections were closed")

    def _refuse(self, status: int, content: bytes, *, is_load: bool = False) -> None:
        """Raise the error for an answer with this status."""
        try:
            body = orjson.loads(content)
            message = str(body.get("error", {}).get("message") or body.get("detail") or body)
        except (orjson.JSONDecodeError, AttributeError):
            message = content.decode(errors="replace")
        message = " ".join(message.split())[:500] or f"HTTP status {status}"
        if status < _UNAVAILABLE or is_load:
            raise UsageError(f"the vLLM server {self.url} rejected a request: {message}")
        raise ServerLostError(message)


def _reason(error: httpx.HTTPError) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
