"""Print the peak memory (MiB) of an update of two passes beyond weights, gradients and optimiser state.

Arguments: size of the vocabulary, "tied" or "untied", tokens of a pass.
"""

from __future__ import annotations

import resource
import sys
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from envkit.trainer_bridge.algorithms import catalogue
from envkit.trainer_bridge.trainers.torch_local import TorchTrainer, TrainerSettings
from tests.trainer_bridge.models import sample

ROW_TOKENS = 256


def main(vocabulary: int, micro_tokens: int, *, is_tied: bool) -> None:
    torch.set_num_threads(1)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=2,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=is_tied,
    )
    model: Any = LlamaForCausalLM(config)
    model.eval()
    settings = TrainerSettings(
        1e-6, 1e-5, 1.0, micro_tokens, seed=0, precision="bfloat16", is_large=True, gradient_checkpointing=True
    )
    trainer = TorchTrainer(model, catalogue.resolve("grpo", {"minibatches": 1}), settings, None)
    rows = 2 * micro_tokens // ROW_TOKENS  # two passes, so that gradients are added to
    ids = torch.randint(3, vocabulary, (rows, ROW_TOKENS), generator=torch.Generator().manual_seed(0)).tolist()
    samples = [
        sample(row[:1], (row[1:], ()), rewards=[float(number % 2)], logprobs=[-7.0] * (ROW_TOKENS - 1))
        for number, row in enumerate(ids)
    ]
    trainer.accumulate(samples)
    report = trainer.update()
    assert report["learned_tokens"] == rows * (ROW_TOKENS - 1)
    state = 4 * 4 * sum(weight.numel() for weight in model.parameters())
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - state / 2**20)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[3]), is_tied=sys.argv[2] == "tied")
