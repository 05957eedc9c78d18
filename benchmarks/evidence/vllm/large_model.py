"""Train a model of the shape of Qwen2.5-0.5B with LoRA in bfloat16 for two steps, and measure memory and transfers.

    envkit model get smollm2-135m
    python benchmarks/evidence/vllm/large_model.py

The model is made from a configuration, with random weights and the tokenizer of SmolLM2. ``train`` parts make two train
steps of ``examples/llm-arithmetic.yaml`` with few and short episodes, and with an entropy term, because the reward of a
random model is 0 and samples without an advantage are skipped. ``push`` parts push all weights (with noise) and an
adapter of rank 16 to a server three times. Memory is the peak of resident memory of each process, which includes the
pages of mapped files. Takes 20 minutes on processors without instructions for bfloat16.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # the folder of `record`
import anyio
import torch
from agreement import push
from parts import load, new_qwen2, perturb, trainer, vllm_engine
from record import ROOT, Evidence, parser
from record.processes import peaks
from runs import LEAST_MIB, Figures, engine_of, train

from envkit import clock
from envkit.trainer_bridge.weights.channel import WeightChannel, weights_folder
from envkit.trainer_bridge.weights.lora import LoraSettings, add_adapter
from envkit.types import SamplingParams

NAME = "large-model"
STALE_AFTER = (
    "trainer_bridge/engines/vllm",
    "trainer_bridge/trainers",
    "trainer_bridge/weights",
)
TWIN = (
    "tests/trainer_bridge/trainers/test_lora.py::"
    "test_an_engine_that_takes_adapters_gets_the_adapter_alone_in_the_format_of_peft"
)
SIZES = {
    "hidden_size": 896,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
    "vocab_size": 151_936,
    "max_position_embeddings": 4096,
}
RANK = 16
MAX_TRAINER_MIB = 8 * 1024
PARTS = ("push all weights", "push an adapter", "train with vllm", "train with transformers")
SETTINGS = [
    *(f"trainer.lora.rank={RANK}", "trainer.precision=bfloat16"),
    *("trainer.gradient_checkpointing=true", "threads=1", "trainer.steps=2", "trainer.groups_per_step=2"),
    *("trainer.schedule=constant", "engine.dtype=bfloat16", "rollout.group_size=2", "rollout.turn_tokens=8"),
    *("algorithm.entropy_coefficient=0.01", "evaluation.episodes=1", "evaluation.every=10", "env.num_envs=4"),
]


def main() -> None:
    arguments = parser(__doc__, NAME)
    arguments.add_argument("--only", choices=PARTS, help="measure only this part")
    arguments.add_argument("--python", type=Path, help="interpreter with vllm; default: that of `make vllm`")
    arguments.add_argument("--layers", type=int, default=SIZES["num_hidden_layers"], help="layers of the model")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    evidence = Evidence(NAME, stale_after=STALE_AFTER, folder=options.folder, fresh=options.fresh)
    with TemporaryDirectory() as name:
        folder = Path(name) / "qwen2-0.5b"
        model = new_qwen2(folder, dtype="bfloat16", **{**SIZES, "num_hidden_layers": options.layers})
        size = sum(weight.numel() for weight in model.parameters())
        del model
        evidence.part("model", lambda: {**SIZES, "num_hidden_layers": options.layers, "parameters": size})
        for part in PARTS:
            if options.only in (None, part):
                kind = part.rpartition(" ")[2]
                if part.startswith("push"):
                    measure = partial(anyio.run, partial(pushes, folder, options, is_adapter=kind == "adapter"))
                else:
                    settings = [*SETTINGS, *engine_of(kind, options), f"engine.model={folder}"]
                    measure = partial(train, ROOT / "examples" / "llm-arithmetic.yaml", settings)
                evidence.part(part, measure)
    if all(map(evidence.has, PARTS)):
        evidence.part("claims", lambda: claims({part: evidence.part(part, dict) for part in PARTS}))


async def pushes(folder: Path, options: Any, *, is_adapter: bool) -> Figures:
    """Push new weights to a server three times, and return the seconds."""
    model = load(folder, "bfloat16")
    rank = RANK if is_adapter else 0
    if is_adapter:
        add_adapter(model, LoraSettings(rank, 2.0 * rank), base=str(folder), seed=1)
    found: Figures = {"pushes": []}
    with peaks() as memory, TemporaryDirectory() as scratch, weights_folder(Path(scratch)) as weights:
        publisher = trainer(model, weights, engine_dtype="bfloat16", publishes_adapter=is_adapter)
        engine = vllm_engine(folder, options.python, dtype="bfloat16", max_tokens=64, lora_rank=rank)
        began = clock.stopwatch()
        async with engine.running():
            found["start_s"] = round(clock.stopwatch() - began, 1)
            channel = WeightChannel(publisher, engine)
            params = SamplingParams(max_tokens=8, seed=1)
            for version in range(1, 4):
                perturb(model, version, share=0.1)
                publisher.version = version
                pushed = await push(channel)
                completion = await engine.generate([1, 2, 3], params)
                found["pushes"].append({**pushed, "tokens": completion.token_ids.tolist()})
                print(pushed, flush=True)
        found["peak_memory_mib"] = {name: mib for name, mib in sorted(memory.items()) if mib >= LEAST_MIB}
    return found


def claims(parts: dict[str, Figures]) -> Figures:
    """Compare the trainer's memory with the limit, and collect the seconds of transfers."""
    found: Figures = {}
    for kind in ("vllm", "transformers"):
        memory = parts[f"train with {kind}"]["peak_memory_mib"]
        found[f"{kind}: peak of the trainer's process in MiB"] = memory["envkit train"]
        found[f"{kind}: at most {MAX_TRAINER_MIB} MiB"] = memory["envkit train"] <= MAX_TRAINER_MIB
        found[f"{kind}: sum of the peaks of all processes in MiB"] = sum(memory.values())
    for part in PARTS[:2]:
        found[f"{part}: size in MiB"] = parts[part]["pushes"][-1]["files_mib"]
        found[f"{part}: exposed seconds"] = [one["exposed_s"] for one in parts[part]["pushes"]]
    return found


if __name__ == "__main__":
    main()
