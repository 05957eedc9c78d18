"""The latency that the proxy of foreign agents adds to the engine's own, with 256 streams at the same time.

The engine only waits: it samples 5 tokens per second and stream. Each client sends one request after another on its own
connection, and reads each stream to its end. The latency added is the time from sending a request to its last byte,
minus the time in which the engine answered. The server runs in a process of its own.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import socket
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import anyio
import uvicorn

sys.path.append(str(Path(__file__).parents[1]))  # the folder of `settings`
from settings import parsed, parser

from envkit import clock
from envkit.trainer_bridge.agents.messages import ModelRequest, Reply
from envkit.trainer_bridge.agents.proxy import AgentProxy

TOKENS_PER_S = 5
TOKENS = (4, 24)
"""Smallest and greatest number of tokens of an answer."""
P50_MS, P99_MS = 3.0, 15.0
"""What is claimed."""


@dataclass
class SleepingCall:
    """An answer whose `Reply.prompt_tokens` is the time that it took, in microseconds."""

    tokens: int
    begin_s: float

    async def replies(self) -> Sequence[Reply]:
        await anyio.sleep(self.begin_s + self.tokens / TOKENS_PER_S - clock.precise())
        took_us = round(1e6 * (clock.precise() - self.begin_s))
        return [Reply(content="word " * self.tokens, prompt_tokens=took_us)]

    def delivered(self, index: int = 0, characters: int | None = None) -> None:
        pass

    def abort(self) -> None:
        pass


class SleepingEngine:
    def start(self, request: ModelRequest) -> SleepingCall:
        assert request.max_tokens is not None
        return SleepingCall(request.max_tokens, clock.precise())

    def count(self, request: ModelRequest) -> int:
        raise NotImplementedError

    async def step(self, action: str) -> dict[str, object]:
        raise NotImplementedError


def serve(streams: int) -> None:
    """Serve one episode for each stream until SIGTERM; print the port and the secrets first."""
    proxy = AgentProxy()
    listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
    secrets = [proxy.add(SleepingEngine()) for _ in range(streams)]
    print(json.dumps([listening.getsockname()[1], secrets]), flush=True)
    config = uvicorn.Config(proxy, lifespan="off", log_level="warning", access_log=False)
    uvicorn.Server(config).run(sockets=[listening])


async def play(port: int, secret: str, rng: random.Random, end_s: float, added_ms: list[float]) -> None:
    """Send requests until the time `end_s`, and add the latencies to `added_ms`."""
    await anyio.sleep(rng.random() * TOKENS[1] / TOKENS_PER_S)
    async with await anyio.connect_tcp("127.0.0.1", port) as connection:
        for number in itertools.count():
            if clock.precise() > end_s:
                return
            messages = [{"role": "user", "content": f"{number} " + "x" * 2000}]
            asked = {"model": "m", "messages": messages, "stream": True, "stream_options": {"include_usage": True}}
            body = json.dumps({**asked, "max_tokens": rng.randint(*TOKENS)}).encode()
            head = f"POST /e/{secret}/v1/chat/completions HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body)}\r\n\r\n"
            begin_s, received = clock.precise(), b""
            await connection.send(head.encode() + body)
            while not received.endswith(b"0\r\n\r\n"):
                received += await connection.receive()
            took_ms = 1000 * (clock.precise() - begin_s)
            engine_us = int(received.partition(b'"prompt_tokens":')[2].partition(b",")[0])
            added_ms.append(took_ms - engine_us / 1000)


async def measure(settings: argparse.Namespace, port: int, secrets: Sequence[str]) -> list[float]:
    added_ms: list[float] = []
    end_s = clock.precise() + settings.seconds
    async with anyio.create_task_group() as tasks:
        for seed, secret in enumerate(secrets):
            tasks.start_soon(play, port, secret, random.Random(seed), end_s, added_ms)
    return added_ms


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--streams", type=int, default=256, help="number of streams at the same time")
    arguments.add_argument("--seconds", type=float, default=60.0, help="time in which requests are sent")
    arguments.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    settings = parsed(arguments, streams=4, seconds=3.0)
    if settings.serve:
        serve(settings.streams)
        return
    command = [sys.executable, __file__, "--serve", "--streams", str(settings.streams)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        port, secrets = json.loads(server.stdout.readline())
        added_ms = clock.run(measure, settings, port, secrets, fast=True)
    finally:
        server.terminate()
        _, _, usage = os.wait4(server.pid, 0)
        server.returncode = 0
    p50, p99 = statistics.median(added_ms), statistics.quantiles(added_ms, n=100)[98]
    cpu_ms = 1000 * (usage.ru_utime + usage.ru_stime) / len(added_ms)
    load = os.getloadavg()[0]
    print(f"{len(added_ms)} answers of {settings.streams} streams, load average {load:.1f}")
    print(f"  latency added: p50 {p50:.2f} ms (claim: {P50_MS:g} ms), p99 {p99:.2f} ms (claim: {P99_MS:g} ms)")
    print(f"  the server's CPU time, with its start: {cpu_ms:.2f} ms per answer")
    if not settings.quick and (p50 > P50_MS or p99 > P99_MS):
        sys.exit("a claim does not hold")


if __name__ == "__main__":
    main()
