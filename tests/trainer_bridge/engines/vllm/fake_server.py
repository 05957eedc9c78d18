"""A scripted server with the routes of vLLM that the engine uses. The token at each position is the position itself."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import anyio

from envkit.trainer_bridge.engines.vllm.engine import VllmEngine
from envkit.trainer_bridge.engines.vllm.plugin.envkit_fetch import PATH, FetchError, Store
from envkit.trainer_bridge.engines.vllm.replica import VllmSettings
from envkit.types import SamplingParams

PREFIX = "generate-tokens-"
Body = dict[str, Any]


@dataclass(eq=False)
class FakeServer:
    """A server on a port of this machine. It is also what the engine's functions that make servers return.

    Attributes:
        token_s: Seconds of each token.
        dies_after: Number of tokens after which the next completion kills the server; None for never. The same for:
        stalls_after: it sends nothing more, but keeps the connection;
        ends_after: it says that the completion is over.
        max_tokens: Its limit of tokens.
        dtype: Number format of its weights.
        has_lora: Whether it was started for LoRA adapters.
        rejects: Locations of weights that it cannot load.
        label: Label of its weights, which is `label_at_start` after a start.
        slots: Maximum number of completions in progress; others wait.
        loads: Locations of the loaded weights.
        store: Where it keeps fetched weights; None if it cannot fetch any.
        fetches: Number of bytes of each fetch.
        requests: Bodies of the requests for completions.
        starts: Number of starts.
        host: Address on which it listens.
        errors: Number of answers with status 500, each of which leaves a stack trace in the log of a real server.
        running: Completions in progress.
        is_paused: Whether it was paused and not resumed.
        is_updating: Whether an update of the weights was begun and neither finished nor rejected.
    """

    token_s: float = 0.002
    dies_after: int | None = None
    stalls_after: int | None = None
    ends_after: int | None = None
    max_tokens: int = 1000
    dtype: str = "float32"
    has_lora: bool = True
    rejects: set[str] = field(default_factory=set)
    label: str = "default"
    label_at_start: str = "default"
    slots: int = 1000
    loads: list[str] = field(default_factory=list)
    store: Store | None = None
    fetches: list[int] = field(default_factory=list)
    requests: list[Body] = field(default_factory=list)
    starts: int = 0
    errors: int = 0
    running: int = 0
    is_paused: bool = False
    is_updating: bool = False
    url: str = ""
    host: str = "127.0.0.1"
    _port: int = 0
    _listener: asyncio.Server | None = None
    _connections: set[asyncio.StreamWriter] = field(default_factory=set)
    _ended: asyncio.Event = field(default_factory=asyncio.Event)
    _aborted: set[str] = field(default_factory=set)
    _free: asyncio.Semaphore = field(default_factory=asyncio.Semaphore)

    # --- What the engine expects of a server that it starts ---

    async def start(self, timeout_s: float) -> None:
        self.starts += 1
        self._ended = asyncio.Event()
        self.label = self.label_at_start
        self._free = asyncio.Semaphore(self.slots)
        self._listener = await asyncio.start_server(self._serve, self.host, self._port)
        self._port = self._listener.sockets[0].getsockname()[1]
        self.url = f"http://{self.host}:{self._port}"

    async def wait_ended(self) -> str:
        await self._ended.wait()
        return "killed by signal 9"

    async def kill(self) -> None:
        """Close the port and all connections, as the kernel does for a process that was killed."""
        if self._listener is not None:
            self._listener.close()
        for writer in list(self._connections):
            writer.transport.abort()
        self._ended.set()

    async def stop(self) -> None:
        await self.kill()

    # --- HTTP ---

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(writer)
        try:
            with suppress(asyncio.IncompleteReadError, ConnectionError):
                while True:
                    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                    _, path, _ = head[0].split(" ")
                    lengths = [line.partition(":")[2] for line in head if line.lower().startswith("content-length")]
                    content = await reader.readexactly(int(lengths[0])) if lengths else b""
                    body = json.loads(content) if content else {}
                    if path == "/inference/v1/generate":
                        async with self._free:
                            if not writer.is_closing() and not reader.at_eof():
                                await self._complete(body, writer)
                    else:
                        status, answer = self._answer(path, body)
                        self.errors += status >= 500
                        await _send(writer, status, answer)
        finally:
            self._connections.discard(writer)
            writer.close()

    def _answer(self, path: str, body: Body) -> tuple[int, object]:
        match path:
            case "/v1/models":
                return 200, {"data": [{"id": "policy-base", "max_model_len": self.max_tokens}]}
            case "/v1/chat/completions":
                message = {"role": "assistant", "content": f"{body['model']} says 1"}
                return 200, {"choices": [{"message": message, "finish_reason": "stop"}]}
            case "/weight_info":
                return 200, {"weight_version": self.label}
            case "/server_info":
                return 200, {"vllm_config": f"model='m', dtype=torch.{self.dtype}, seed=0"}
            case "/metrics":
                prompts = sum(len(one["token_ids"]) for one in self.requests)
                running = f'vllm:num_requests_running{{engine="0"}} {self.running}'
                return 200, f'vllm:prompt_tokens_total{{engine="0"}} {prompts}\n{running}'
            case "/abort_requests":
                self._aborted |= set(body["request_ids"])
            case "/pause?mode=abort" | "/resume":
                self.is_paused = path.startswith("/pause")
            case "/update_weight_version":
                self.label = body["new_version"]
            case "/start_weight_update" | "/finish_weight_update" if self.is_updating == path.startswith("/start"):
                return 500, {"error": {"message": "without a matching call"}}
            case "/start_weight_update":
                self.is_updating = True
            case "/finish_weight_update":
                self.label, self.is_updating = body.get("weight_version", self.label), False
            case "/v1/load_lora_adapter" if not body:  # a GET request
                return 405 if self.has_lora else 404, {"detail": ""}
            case _ if path == PATH:
                if self.store is None or not body:  # a GET request
                    return 404 if self.store is None else 405, {"detail": ""}
                try:
                    found = self.store.fetch(body["url"])
                except FetchError as error:
                    return 500, {"error": {"message": str(error)}}
                self.fetches.append(found["bytes"])
                return 200, found
            case "/update_weights" | "/v1/load_lora_adapter":
                location = body["lora_path"] if "lora_path" in body else body["update_info"]["path"]
                if location in self.rejects:
                    self.is_updating = False
                    return 500, {"error": {"message": f"no weights at {location}"}}
                self.loads.append(location)
        return 200, {}

    async def _complete(self, body: Body, writer: asyncio.StreamWriter) -> None:
        self.requests.append(body)
        self.running += 1
        faults, self.dies_after, self.stalls_after = (self.dies_after, self.stalls_after), None, None
        try:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            how, position, finish = body["sampling_params"], len(body["token_ids"]), None
            for count in range(1, how["max_tokens"] + 1):
                if faults[0] == count - 1:
                    await self.kill()
                if faults[1] == count - 1:
                    await asyncio.sleep(60)
                await asyncio.sleep(self.token_s)
                if PREFIX + body["request_id"] in self._aborted:
                    await _send_part(writer, [], "abort", [])
                    break
                is_last = count in (how["max_tokens"], self.ends_after)
                finish = "stop" if position in how["stop_token_ids"] else "length" if is_last else None
                await _send_part(writer, [position], finish, [self.label] if finish else [])
                position += 1
                if finish is not None:
                    break
            writer.write(b"0\r\n\r\n")
            await writer.drain()
        finally:
            self.running -= 1


async def _send(writer: asyncio.StreamWriter, status: int, answer: object) -> None:
    content = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
    kind = "text/plain" if isinstance(answer, str) else "application/json"
    writer.write(f"HTTP/1.1 {status} -\r\ncontent-type: {kind}\r\ncontent-length: {len(content)}\r\n\r\n".encode())
    writer.write(content)
    await writer.drain()


async def _send_part(writer: asyncio.StreamWriter, tokens: list[int], finish: str | None, labels: list[str]) -> None:
    logprobs = {"content": [{"logprob": -token / 100} for token in tokens]}
    versions = [{"version": label} for label in labels] or None
    choice = {"token_ids": tokens, "logprobs": logprobs, "finish_reason": finish, "weight_versions": versions}
    line = b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"
    writer.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")
    await writer.drain()


def settings(**changes: Any) -> VllmSettings:
    return VllmSettings(
        **{"max_tokens": 1000, "max_num_seqs": 8, "dtype": "float32", "start_timeout_s": 5.0, **changes}
    )


@dataclass
class Fleet:
    """An engine on fake servers, with the lines that it announced."""

    engine: VllmEngine
    lines: list[str]


@asynccontextmanager
async def fleet(*servers: FakeServer, owned: bool = False, **changes: Any) -> AsyncIterator[Fleet]:
    """Run an engine on the servers; if `owned`, the engine starts them, and starts them again after a loss."""
    lines: list[str] = []
    where: dict[str, Any] = {"servers": servers}
    if not owned:
        for one in servers:
            await one.start(5.0)
        where = {"urls": [one.url for one in servers]}
    try:
        async with VllmEngine(settings(**changes), announce=lines.append, **where).running() as engine:
            yield Fleet(engine, lines)
    finally:
        for one in servers:
            await one.stop()


async def until(true: Any, *, timeout_s: float = 5.0) -> None:
    """Wait until `true()` is true."""
    with anyio.fail_after(timeout_s):
        while not true():  # noqa: ASYNC110 - whatever it is sets no event
            await anyio.sleep(0.005)


def params(n: int, **changes: Any) -> SamplingParams:
    return SamplingParams(max_tokens=n, **changes)


def positions(prompt: list[int], n: int) -> list[int]:
    """The tokens of a completion."""
    return list(range(len(prompt), len(prompt) + n))
