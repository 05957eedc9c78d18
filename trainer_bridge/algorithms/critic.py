"""The critic: a model that estimates the value of each turn. Axes: B samples, L tokens, N turns of all samples."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from envkit.types import Sample


class Critic(nn.Module):
    """Estimates the return from a turn onwards, given all tokens before the turn's completion.

    Args:
        model: A causal language model; the critic starts with a copy of its body.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.body = copy.deepcopy(model.base_model)
        width = model.config.get_text_config().hidden_size
        self.head = nn.Linear(width, 1, device=model.device, dtype=model.dtype)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, samples: Sequence[Sample]) -> Tensor:
        """Return the estimated value of each turn that has a completion, sample by sample [N]."""
        device = self.head.weight.device
        longest = max(len(sample.token_ids) for sample in samples)
        ids = [list(sample.token_ids) + [0] * (longest - len(sample.token_ids)) for sample in samples]
        hidden_BLH = self.body(input_ids=torch.tensor(ids, device=device), use_cache=False).last_hidden_state
        starts = [_turn_starts(sample) for sample in samples]
        rows = [row for row, positions in enumerate(starts) for _ in positions]
        columns = [position for positions in starts for position in positions]
        # Compute the value without autocast, because bfloat16 has a precision of only three decimal digits.
        with torch.autocast(device.type, enabled=False):
            value: Tensor = self.head(hidden_BLH[rows, columns].to(self.head.weight.dtype)).squeeze(-1).float()
        return value


def policy_turns(sample: Sample) -> list[int]:
    """Return the indices of the sample's turns that have a completion, in order."""
    return [sample.turn_ids[position + 1] for position in _turn_starts(sample)]


def _turn_starts(sample: Sample) -> list[int]:
    """Return, for each completion, the position of the last token before it."""
    starts: list[int] = []
    last = -1
    for position, (is_policy, turn) in enumerate(zip(sample.mask, sample.turn_ids, strict=True)):
        if is_policy and turn != last:
            starts.append(position - 1)
            last = turn
    return starts
