"""How many tokens per second of several vLLM servers pass through the process of a run, and what a token costs there.

The servers are scripted, each in a process of its own: they send tokens with their log-probabilities at a constant
rate, in the form and in the portions (``--interval``) of vLLM 0.32. One engine of envkit receives all of them.
The streams begin one after another. ``followed`` is the time in which the servers send the completions, divided by the
time in which the engine returns them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import anyio

sys.path.append(str(Path(__file__).parents[1]))  # the folder of `settings`
from settings import parsed, parser

from envkit import clock
from envkit.trainer_bridge.engines.vllm.engine import VllmEngine
from envkit.trainer_bridge.engines.vllm.replica import VllmSettings
from envkit.types import SamplingParams

LEAST_FOLLOWED = 0.9
"""What is claimed."""
PROMPT = 500
MODEL = {"data": [{"id": "m", "max_model_len": 1 << 20}]}
ANSWERS = {"/v1/models": MODEL, "/weight_info": {"weight_version": "default"}, "/server_info": {"vllm_config": ""}}


class Server:
    """A scripted server that sends `rate` tokens per second of each completion, `interval` at a time."""

    def __init__(self, rate: float, interval: int) -> None:
        self.rate = rate
        self.interval = interval
        self.label = "default"
        self.rendered: dict[tuple[int, bool], bytes] = {}

    async def serve(self) -> None:
        listening = await asyncio.start_server(self.answer, "127.0.0.1", 0)
        print(listening.sockets[0].getsockname()[1], flush=True)
        await listening.serve_forever()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                path = head.split(" ", 2)[1]
                length = head.partition("content-length: ")[2].partition("\r\n")[0]
                body = json.loads(await reader.readexactly(int(length))) if length.strip("0") else {}
                if path == "/inference/v1/generate":
                    await self.complete(body["request_id"], body["sampling_params"]["max_tokens"], writer)
                    if "connection: close" in head:
                        break
                    continue
                self.label = body.get("new_version", self.label)
                self.rendered.clear()
                content = json.dumps(ANSWERS.get(path, {})).encode()
                kind = "text/plain" if path == "/metrics" else "application/json"
                writer.write(f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ncontent-length: ".encode())
                writer.write(f"{len(content)}\r\n\r\n".encode() + content)
        writer.close()

    async def complete(self, name: str, count: int, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        begin_s = clock.precise()
        for sent in range(self.interval, count + self.interval, self.interval):
            await asyncio.sleep(begin_s + min(sent, count) / self.rate - clock.precise())
            line = self.line(name, min(self.interval, count - sent + self.interval), is_last=sent >= count)
            writer.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")
            await writer.drain()
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")

    def line(self, name: str, count: int, *, is_last: bool) -> bytes:
        form = (count, is_last)
        if form not in self.rendered:
            self.rendered[form] = self.render(count, is_last=is_last)
        return b'data: {"request_id":"generate-tokens-' + name.encode() + self.rendered[form]

    def render(self, count: int, *, is_last: bool) -> bytes:
        one = {"token_id": 28120, "logprob": -0.6931471824645996, "rank": 1}
        choice = {
            "index": 0,
            "finish_reason": "length" if is_last else None,
            "stop_reason": None,
            "token_ids": [28120] * count,
            "routed_experts": None,
            "sampling_mask": None,
            "weight_versions": [{"version": self.label, "start": 0, "end": count}] if is_last else None,
            "logprobs": {"content": [{**one, "top_logprobs": [one]}] * count},
        }
        body = {"usage": None, "output_mode": "tokens", "choices": [choice]}
        return b'",' + json.dumps(body, separators=(",", ":")).encode()[1:] + b"\n\n"


async def measure(settings: argparse.Namespace, ports: list[int]) -> tuple[float, float]:
    """Return how much of the rate the engine followed, and processor microseconds per token."""
    how = SamplingParams(max_tokens=settings.tokens)
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    engine_settings = VllmSettings(max_tokens=1 << 20, max_num_seqs=settings.streams, dtype="bfloat16")
    received, waited_s = 0, 0.0
    completion_s = settings.tokens * settings.streams / settings.rate

    async def play(engine: VllmEngine, number: int) -> None:
        nonlocal received, waited_s
        await anyio.sleep(completion_s * number / settings.streams)
        begin_s = clock.precise()
        for turn in range(settings.turns):
            got = await engine.generate([number, turn] * (PROMPT // 2), how, session=str(number))
            received += len(got.token_ids)
        waited_s += clock.precise() - begin_s

    async with VllmEngine(engine_settings, urls=urls).running() as engine:
        cpu_s = time.process_time()
        async with anyio.create_task_group() as tasks:
            for number in range(settings.streams):
                tasks.start_soon(play, engine, number)
        cpu_s = time.process_time() - cpu_s
    count = settings.streams * settings.turns
    assert received == count * settings.tokens
    return completion_s * count / waited_s, 1e6 * cpu_s / received


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--rate", type=float, default=50_000, help="tokens per second of all servers together")
    arguments.add_argument("--servers", type=int, default=4, help="number of servers")
    arguments.add_argument("--streams", type=int, default=256, help="number of completions at the same time")
    arguments.add_argument("--tokens", type=int, default=1024, help="tokens of a completion")
    arguments.add_argument("--turns", type=int, default=2, help="completions of a stream, one after another")
    arguments.add_argument("--interval", type=int, default=32, help="tokens that a server sends at once")
    arguments.add_argument("--rounds", type=int, default=5, help="rounds of which the median counts")
    arguments.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    settings = parsed(arguments, rate=2000, servers=2, streams=4, tokens=64, turns=1, rounds=1)
    if settings.serve:
        asyncio.run(Server(settings.rate / settings.streams, settings.interval).serve())
        return
    words = ["--serve", *(f"--{key}={getattr(settings, key)}" for key in ("rate", "streams", "interval"))]
    command = [sys.executable, __file__, *words]
    servers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(settings.servers)]
    try:
        ports = [int(server.stdout.readline()) for server in servers if server.stdout is not None]
        rounds = [clock.run(measure, settings, ports) for _ in range(settings.rounds)]
    finally:
        for server in servers:
            server.terminate()
            server.wait()
    followed, cost_us = (statistics.median(column) for column in zip(*rounds, strict=True))
    load = os.getloadavg()[0]
    print(
        f"{settings.servers} servers, {settings.streams} streams, {settings.interval} tokens at a time, load {load:.1f}"
    )
    print(f"  followed {followed:.3f} of {settings.rate:,.0f} tokens/s (claim: {LEAST_FOLLOWED:g})")
    print(f"  processor time of the run: {cost_us:.1f} us per token, {1e6 / cost_us:,.0f} tokens per processor second")
    if not settings.quick and followed < LEAST_FOLLOWED:
        sys.exit("a claim does not hold")


if __name__ == "__main__":
    main()
