"""Measure how many tokens per second the engines sample, with SmolLM2-135M in float32.

    envkit model get smollm2-135m
    python benchmarks/evidence/vllm/performance.py

64 tokens for prompts of 64 random tokens, with 1, 16 and 64 completions at once, by both engines in turn. Both compute
with one thread. ``vllm, one answer`` asks the server for one answer at the end, instead of the server-sent events that
the engine uses. The figures are medians. `learning.py` measures the parts of a train step. Takes a quarter of an hour
on two quiet cores.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # the folder of `record`
import anyio
import httpx
import torch
from parts import load, model_folder, server_settings
from record import Evidence, parser
from record.processes import peaks
from runs import LEAST_MIB, Figures

from envkit import clock
from envkit.trainer_bridge.engines.transformers import TransformersEngine
from envkit.trainer_bridge.engines.vllm.engine import VllmEngine, VllmSettings
from envkit.trainer_bridge.engines.vllm.server import VllmServer
from envkit.types import SamplingParams
from envkit.wiring.launch.local import LocalLauncher

NAME = "vllm-performance"
STALE_AFTER = ("trainer_bridge/engines",)
TWIN = "tests/contract/engines/test_training.py::test_asynchronous_train_steps_on_a_server_have_no_finding"
TOKENS = 64
AT_ONCE = (1, 16, 64)
REPEATS = 3
PART = "tokens per second"

Sample = Callable[[Sequence[int], int], Awaitable[int]]


def main() -> None:
    arguments = parser(__doc__, NAME)
    arguments.add_argument("--python", type=Path, help="interpreter with vllm; default: that of `make vllm`")
    arguments.add_argument("--repeats", type=int, default=REPEATS, help="number of repetitions")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    evidence = Evidence(NAME, stale_after=STALE_AFTER, folder=options.folder, fresh=options.fresh)
    evidence.part(PART, partial(anyio.run, throughput, options))


async def throughput(options: Any) -> Figures:
    """Return tokens per second by engine and number of completions at once."""
    folder = model_folder()
    settings = server_settings(folder, options.python, dtype="float32", max_tokens=2 * TOKENS)
    server = VllmServer(settings, launcher=LocalLauncher(), announce=print)
    vllm = VllmEngine(VllmSettings(max_tokens=2 * TOKENS, max_num_seqs=64, dtype="float32"), servers=[server])
    transformers = TransformersEngine(load(folder), pad_id=0, batch_tokens=65536, threads=1)
    found: Figures = {}
    with peaks() as memory:
        began = clock.stopwatch()
        async with vllm.running(), httpx.AsyncClient(trust_env=False, timeout=600, limits=httpx.Limits()) as http:
            found["start_s"] = round(clock.stopwatch() - began, 1)
            ways: dict[str, Sample] = {
                "transformers": partial(by_engine, transformers),
                "vllm": partial(by_engine, vllm),
                "vllm, one answer": partial(in_one_answer, http, server.url),
            }
            for at_once in AT_ONCE:
                rates: dict[str, list[float]] = {name: [] for name in ways}
                loads = []
                for number in range(options.repeats + 1):
                    loads.append(os.getloadavg()[0])
                    for name, way in ways.items():
                        rate = await tokens_per_s(way, at_once, seed=number)
                        if number:  # the first round warms up
                            rates[name].append(rate)
                medians = {name: statistics.median(values) for name, values in rates.items()}
                found[f"{at_once} at once"] = {
                    "tokens_per_s": {name: round(value, 1) for name, value in medians.items()},
                    "range": {name: [round(min(values), 1), round(max(values), 1)] for name, values in rates.items()},
                    "vllm / transformers": round(medians["vllm"] / medians["transformers"], 2),
                    "vllm / vllm, one answer": round(medians["vllm"] / medians["vllm, one answer"], 2),
                    "load": [round(min(loads), 1), round(max(loads), 1)],
                }
                print(at_once, found[f"{at_once} at once"], flush=True)
    found["peak_memory_mib"] = {name: mib for name, mib in sorted(memory.items()) if mib >= LEAST_MIB}
    return found


async def tokens_per_s(way: Sample, at_once: int, *, seed: int) -> float:
    """Sample completions of `TOKENS` tokens for different prompts of as many, and return the tokens per second."""
    draw = random.Random(seed)
    prompts = [[draw.randrange(100, 40_000) for _ in range(TOKENS)] for _ in range(at_once)]
    counts: list[int] = []

    async def one(number: int) -> None:
        counts.append(await way(prompts[number], number))

    began = clock.stopwatch()
    async with anyio.create_task_group() as tasks:
        for number in range(at_once):
            tasks.start_soon(one, number)
    seconds = clock.stopwatch() - began
    assert counts == [TOKENS] * at_once
    return at_once * TOKENS / seconds


async def by_engine(engine: Any, prompt: Sequence[int], seed: int) -> int:
    """Return the number of tokens that an engine samples for a prompt."""
    completion = await engine.generate(prompt, SamplingParams(max_tokens=TOKENS, seed=seed))
    return len(completion.token_ids)


async def in_one_answer(http: httpx.AsyncClient, url: str, prompt: Sequence[int], seed: int) -> int:
    """Return the number of tokens that a vLLM server samples for a prompt, without streaming."""
    sampling = {"max_tokens": TOKENS, "seed": seed, "logprobs": 0, "ignore_eos": True}
    body = {"token_ids": list(prompt), "sampling_params": sampling}
    reply = await http.post(f"{url}/inference/v1/generate", json=body)
    reply.raise_for_status()
    return len(reply.json()["choices"][0]["token_ids"])


if __name__ == "__main__":
    main()
