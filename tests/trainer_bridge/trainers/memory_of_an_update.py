"""Print the peak memory (MiB) of an update of two passes.

Arguments: sizes of the vocabulary ("1000,100000"), each with its own model and line of output, "tied" or "untied",
tokens of a pass, and the width of the models, 64 or a multiple of 192 (default: 576, SmolLM2's); weights, gradients and
optimiser state do not count. The peak is that of the process, so sizes must rise.
Or a model folder, "plain" or "checkpointing", tokens of a pass; the whole process counts, and the copy that plays with
it.
"""

from __future__ import annotations

import resource
import sys
from typing import Any

import anyio
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from envkit.trainer_bridge.trainers.torch_local import TorchTrainer, TrainerSettings
from tests.trainer_bridge.models import fast_format, sample
from tests.trainer_bridge.trainees import algorithm_of

ROW_TOKENS = 256


def made(vocabulary: int, width: int, *, is_tied: bool) -> Any:
    """Return two layers with the proportions of SmolLM2."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=width * 8 // 3,
        num_hidden_layers=2,
        num_attention_heads=width // 64,
        num_key_value_heads=max(1, width // 192),
        tie_word_embeddings=is_tied,
    )
    return LlamaForCausalLM(config)


def update(model: Any, micro_tokens: int, *, is_checkpointing: bool) -> float:
    """Make an update of two passes and return the peak of the process so far, in MiB."""
    torch.set_num_threads(1)
    model.eval()
    settings = TrainerSettings(
        1e-6,
        1e-5,
        1.0,
        micro_tokens,
        seed=0,
        precision=fast_format(),
        gradient_checkpointing=is_checkpointing,
    )
    trainer = TorchTrainer(model, algorithm_of(minibatches=1), settings, None)
    rows = 2 * micro_tokens // ROW_TOKENS  # two passes, so that gradients are added to
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(3, model.config.vocab_size, (rows, ROW_TOKENS), generator=draw).tolist()
    samples = [
        sample(row[:1], (row[1:], ()), rewards=[float(number % 2)], logprobs=[-7.0] * (ROW_TOKENS - 1))
        for number, row in enumerate(ids)
    ]

    async def learn() -> dict[str, float]:
        await trainer.accumulate(samples)
        return await trainer.update()

    report = anyio.run(learn)
    assert report["learned_tokens"] == rows * (ROW_TOKENS - 1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main(what: str, kind: str, micro_tokens: int, width: int = 576) -> None:
    if what[0].isdecimal():
        for vocabulary in map(int, what.split(",")):
            model = made(vocabulary, width, is_tied=kind == "tied")
            state = 4 * 4 * sum(weight.numel() for weight in model.parameters())
            print(update(model, micro_tokens, is_checkpointing=True) - state / 2**20)
    else:
        model, playing = (AutoModelForCausalLM.from_pretrained(what, dtype=one) for one in ("float32", fast_format()))
        print(update(model, micro_tokens, is_checkpointing=kind == "checkpointing"))
        del playing


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
