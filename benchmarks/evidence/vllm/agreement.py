"""Compare the log-probabilities of vLLM and of the trainer for the same tokens, before and after weight updates.

    envkit model get smollm2-135m
    python benchmarks/evidence/vllm/agreement.py

SmolLM2-135M-Instruct, 16 prompts with 32 tokens each, at the temperatures 1.0 and 0.7: with all weights and with a LoRA
adapter of rank 8, on servers in bfloat16 and float32. Each update adds noise to all trained weights. A float32 server
is compared with a trainer in float32. A bfloat16 server is compared with a trainer that multiplies in bfloat16
(autocast; the weights are float32, or bfloat16 below an adapter) and, as a reference, with the same weights without
autocast. ``withheld`` is the difference that a missed update would have made: the tokens of the version before, under
the new weights. Takes 30 minutes.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # the folder of `record`
import anyio
import numpy as np
import torch
from parts import chat_prompts, load, model_folder, perturb, sample_of, trainer, vllm_engine
from record import Evidence, parser

from envkit import clock
from envkit.trainer_bridge.engines.vllm.engine import VllmEngine
from envkit.trainer_bridge.weights.channel import WeightChannel, weights_folder
from envkit.trainer_bridge.weights.lora import LoraSettings, add_adapter
from envkit.types import Completion, Sample, SamplingParams

NAME = "vllm-agreement"
STALE_AFTER = (
    "trainer_bridge/engines/vllm",
    "trainer_bridge/trainers/token_logps.py",
    "trainer_bridge/trainers/torch_local.py",
    "trainer_bridge/weights",
)
TWIN = "tests/contract/engines/test_training.py::test_the_log_probabilities_agree_after_each_of_two_updates"
LIMITS = {"bfloat16": 0.05, "float32": 1e-4}
"""Maximum mean absolute difference in nats."""
TEMPERATURES = (1.0, 0.7)
TOPICS = ("rain", "rivers", "a lighthouse", "chess", "bread", "the moon", "an old clock", "snow") * 2
UPDATES = {"float32": 3, "bfloat16": 2}
"""Fewer in bfloat16: without instructions for it, a processor takes several times longer."""
NOISE = {"all weights": 0.03, "adapter": 1.0}
RANK = 8

Figures = dict[str, Any]


def main() -> None:
    arguments = parser(__doc__, NAME)
    arguments.add_argument("--only", choices=LIMITS, help="measure only servers with this number format")
    arguments.add_argument("--kind", choices=NOISE, help="measure only this kind of update")
    arguments.add_argument("--python", type=Path, help="interpreter with vllm; default: that of `make vllm`")
    arguments.add_argument("--prompts", type=int, help="number of prompts; default: 16")
    arguments.add_argument("--updates", type=int, help="number of updates")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    evidence = Evidence(NAME, stale_after=STALE_AFTER, folder=options.folder, fresh=options.fresh)
    parts: dict[str, Figures] = {}
    for dtype in LIMITS:
        for kind in NOISE:
            if options.only in (None, dtype) and options.kind in (None, kind):
                measure = partial(anyio.run, partial(agreement, kind, dtype, options))
                parts[f"{kind}, {dtype}"] = evidence.part(f"{kind}, {dtype}", measure)
    if len(parts) == len(LIMITS) * len(NOISE):
        evidence.part("claims", lambda: claims(parts))


async def agreement(kind: str, dtype: str, options: Any) -> Figures:
    """Start a server, push updates, and compare after each one."""
    folder, is_adapter = model_folder(), kind == "adapter"
    updates = options.updates or (2 if is_adapter else UPDATES[dtype])
    prompts = chat_prompts(folder, [f"Write a sentence about {topic}." for topic in TOPICS[: options.prompts]])
    model = load(folder, dtype if is_adapter else "float32")
    if is_adapter:
        add_adapter(model, LoraSettings(RANK, 2.0 * RANK), base=str(folder), seed=1)
    found: Figures = {"prompts": len(prompts), "versions": []}
    with TemporaryDirectory() as scratch, weights_folder(Path(scratch)) as weights:
        others = {"engine_dtype": dtype, **({"publishes_adapter": True} if is_adapter else {})}
        publisher = trainer(model, weights, **others)
        scorers = {
            f"{precision}, temperature {temperature}": trainer(
                model, None, precision=precision, temperature=temperature
            )
            for precision in dict.fromkeys((dtype, "float32"))
            for temperature in TEMPERATURES
        }
        engine = vllm_engine(folder, options.python, dtype=dtype, max_tokens=128, lora_rank=RANK * is_adapter)
        began = clock.stopwatch()
        async with engine.running():
            found["start_s"] = round(clock.stopwatch() - began, 1)
            channel = WeightChannel(publisher, engine)
            before: Mapping[float, Sequence[Sample]] = {}
            for version in range(updates + 1):
                about: Figures = {"version": version}
                if version:
                    perturb(model, version, share=NOISE[kind])
                    publisher.version = version
                    about |= await push(channel)
                    name = f"{dtype}, temperature 1.0"
                    about["withheld_nats"] = await gap(scorers[name], before[1.0])
                before = {one: await sampled(engine, prompts, one, version) for one in TEMPERATURES}
                about["nats"] = {
                    name: await gap(scorer, before[float(name.rpartition(" ")[2])]) for name, scorer in scorers.items()
                }
                print(about, flush=True)
                found["versions"].append(about)
    return found


async def push(channel: WeightChannel) -> Figures:
    """Push the current weights; return the seconds, and those during which the engine cannot generate."""
    began = clock.stopwatch()
    pushed = await channel.push()
    seconds = clock.stopwatch() - began
    return {
        "push_s": round(seconds, 3),
        "exposed_s": round(pushed.exposed_s, 3),
        "files_mib": files_mib(Path(pushed.weights.location)),
    }


def files_mib(place: Path) -> float:
    """Return the size of a file, or of the files in a folder."""
    return round(sum(one.stat().st_size for one in (place.iterdir() if place.is_dir() else [place])) / 2**20, 1)


async def sampled(
    engine: VllmEngine, prompts: Sequence[Sequence[int]], temperature: float, version: int
) -> list[Sample]:
    """Complete all prompts at once.

    Raises:
        RuntimeError: A token has another version than the one that was pushed.
    """
    done: dict[int, Completion] = {}

    async def complete(number: int) -> None:
        params = SamplingParams(temperature=temperature, max_tokens=32, seed=number)
        done[number] = await engine.generate(prompts[number], params)

    async with anyio.create_task_group() as tasks:
        for number in range(len(prompts)):
            tasks.start_soon(complete, number)
    if strangers := {one.versions for one in done.values()} - {((version, 32),)}:
        raise RuntimeError(f"expected 32 tokens of version {version}, got {strangers}")
    return [sample_of(prompts[number], done[number], episode=str(number)) for number in sorted(done)]


async def gap(scorer: Any, samples: Sequence[Sample]) -> Figures:
    """Return the mean and maximum absolute difference of the log-probabilities in nats."""
    scored = np.concatenate(await scorer.score(samples))
    differences = np.abs(scored - np.concatenate([one.logprobs[one.mask] for one in samples]))
    return {"mean": float(differences.mean()), "max": float(differences.max()), "tokens": len(differences)}


def claims(parts: Mapping[str, Figures]) -> Figures:
    """Compare the largest differences with the limits."""
    found: Figures = {}
    for name, part in parts.items():
        dtype = name.rpartition(" ")[2]
        means = [
            gaps["mean"]
            for version in part["versions"]
            for reference, gaps in version["nats"].items()
            if reference.startswith(dtype)
        ]
        withheld = [version["withheld_nats"]["mean"] for version in part["versions"] if "withheld_nats" in version]
        found[name] = {
            "largest mean difference in nats": max(means),
            f"at most {LIMITS[dtype]}": max(means) <= LIMITS[dtype],
            "smallest mean difference of a withheld update in nats": min(withheld),
            "seconds that the engine was paused for an update": [
                version["exposed_s"] for version in part["versions"] if "exposed_s" in version
            ],
        }
    return found


if __name__ == "__main__":
    main()
