"""Train a tiny mixture of experts, resume it from its checkpoint, and sample from both on a vLLM server.

    python benchmarks/evidence/vllm/experts.py

The model has the shape of Qwen3-MoE (eight experts, two for each token) and random weights. The server fetches all
weights over HTTP, as one on another machine does. ``gap_nats`` is the greatest difference between the log-probabilities
of the server and of the trainer, in float32. Takes two minutes.
"""

from __future__ import annotations

import sys
from pathlib import Path
from socket import create_server
from tempfile import TemporaryDirectory
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # the folder of `record`
import anyio
import numpy as np
import torch
from parts import server_settings
from record import Evidence, parser
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from envkit.trainer_bridge.engines.vllm.engine import VllmEngine, VllmSettings
from envkit.trainer_bridge.engines.vllm.server import VllmServer
from envkit.trainer_bridge.weights.channel import WeightChannel
from envkit.types import SamplingParams
from envkit.wiring.launch.local import LocalLauncher
from tests.trainer_bridge.models import chat_tokenizer, sample, shake
from tests.trainer_bridge.trainees import Trainee, completion_logps, draw_samples

Figures = dict[str, Any]
NAME = "vllm-experts"
STALE_AFTER = ("trainer_bridge/engines/vllm", "trainer_bridge/weights")
TWIN = (
    "tests/trainer_bridge/weights/test_architectures.py::"
    "test_a_mixture_of_experts_resumes_bit_for_bit_and_is_sampled_from"
)
TOLERANCE_NATS = 1e-4
PROMPT = [1, 5, 9]


def main() -> None:
    arguments = parser(__doc__, NAME)
    arguments.add_argument("--python", type=Path, help="interpreter with vllm; default: that of `make vllm`")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    evidence = Evidence(NAME, stale_after=STALE_AFTER, folder=options.folder, fresh=options.fresh)
    with TemporaryDirectory() as scratch:
        figures = evidence.part("pushes", lambda: anyio.run(pushes, Path(scratch), options.python))
    gap = max(one["gap_nats"] for one in figures["pushes"])
    evidence.part("claims", lambda: {f"at most {TOLERANCE_NATS} nats": gap <= TOLERANCE_NATS})


def new_model(folder: Path) -> int:
    """Write a model, and return the number of its parameters."""
    tokenizer = chat_tokenizer()
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=512,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        head_dim=32,  # type: ignore[call-arg]
    )
    model: Any = Qwen3MoeForCausalLM(config)
    shake(model, 1)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return int(model.num_parameters())


async def pushes(scratch: Path, python: Path | None) -> Figures:
    """Push the weights after one update, and after a second one that a resumed trainer makes."""
    folder = scratch / "model"
    found: Figures = {"parameters": new_model(folder), "pushes": []}
    batches = [draw_samples(seed, 8, folder) for seed in range(2)]
    first, resumed = (Trainee(folder, scratch / name, preset="grpo") for name in ("first", "resumed"))
    await first.trainer.accumulate(batches[0])
    await first.trainer.update()
    await anyio.Path(scratch / "checkpoint").mkdir()
    await first.trainer.save(str(scratch / "checkpoint"))
    await resumed.trainer.restore(str(scratch / "checkpoint"))
    await resumed.trainer.accumulate(batches[1])
    await resumed.trainer.update()
    with create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    servers = server_settings(folder, python, dtype="float32", max_tokens=256)
    settings = VllmSettings(max_tokens=256, max_num_seqs=4, dtype="float32", weights_url=url)
    server = VllmServer(servers, launcher=LocalLauncher(), announce=print)
    engine = VllmEngine(settings, servers=[server], announce=print)
    async with engine.running():
        for trainee in (first, resumed):
            pushed = await WeightChannel(trainee.trainer, engine).push()
            got = await engine.generate(PROMPT, SamplingParams(max_tokens=24, seed=1))
            scored = completion_logps(trainee.model, sample(PROMPT, (got.token_ids.tolist(), ())))
            gap = float(np.abs(np.array(scored) - got.logprobs).max())
            versions = [list(one) for one in got.versions]
            found["pushes"].append({"versions": versions, "gap_nats": gap, "exposed_s": round(pushed.exposed_s, 3)})
            print(found["pushes"][-1], flush=True)
    return found


if __name__ == "__main__":
    main()
