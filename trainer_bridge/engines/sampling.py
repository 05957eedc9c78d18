"""Sampling by inverse transform: the uniform number of a token is a hash of its request's seed and its position.

The result therefore depends on the logits alone, not on the state of a random number generator. Axes: B rows, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from envkit.types import SamplingParams, stable_hash

_U64 = float(1 << 64)

_SAMPLED_NUMBERS = 1 << 21
"""Maximum number of logits (rows times vocabulary) to sample from in one operation."""


def sample(logits_BV: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> list[tuple[int, float]]:
    """Sample one token per row; return the tokens with log-probabilities (nats).

    The log-probabilities take the temperature into account, but not top-p and top-k.

    `positions` are the indices of the tokens in their completions [B].
    """
    count = max(_SAMPLED_NUMBERS // logits_BV.shape[1], 1)
    if len(params) > count:
        parts = [slice(first, first + count) for first in range(0, len(params), count)]
        return [pick for rows in parts for pick in sample(logits_BV[rows], params[rows], positions[rows])]
    device = logits_BV.device
    greedy_B = torch.tensor([one.temperature == 0 for one in params], device=device)
    heat_B = torch.tensor([one.temperature or 1.0 for one in params], device=device)
    logp_BV = torch.log_softmax(logits_BV / heat_B[:, None], dim=-1)
    numbers = [stable_hash(one.seed, position) / _U64 for one, position in zip(params, positions, strict=True)]
    weight_BV = _nucleus(logp_BV.exp().double(), params)
    total_BV = weight_BV.cumsum(-1)
    number_B1 = torch.tensor(numbers, dtype=torch.float64, device=device)[:, None] * total_BV[:, -1:]
    drawn_B = torch.searchsorted(total_BV, number_B1, right=True).squeeze(1).clamp(max=logits_BV.shape[1] - 1)
    token_B = torch.where(greedy_B, logp_BV.argmax(-1), drawn_B)
    chosen_B = logp_BV.gather(1, token_B[:, None]).squeeze(1)
    return list(zip(token_B.tolist(), chosen_B.tolist(), strict=True))


def _nucleus(weight_BV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Set the weight of tokens outside top-k and top-p to zero, but always keep the most likely token."""
    if all(one.top_p >= 1 and one.top_k <= 0 for one in params):
        return weight_BV
    size, device = weight_BV.shape[1], weight_BV.device
    sorted_BV, order_BV = weight_BV.sort(dim=-1, descending=True)
    top_k_B1 = torch.tensor([[one.top_k or size] for one in params], device=device)
    top_p_B1 = torch.tensor([[one.top_p] for one in params], device=device)
    before_BV = sorted_BV.cumsum(-1) - sorted_BV
    rank_V = torch.arange(size, device=device)
    dropped_BV = (rank_V >= top_k_B1) | ((before_BV >= top_p_B1) & (rank_V > 0))
    return torch.zeros_like(weight_BV).scatter(1, order_BV, sorted_BV.masked_fill(dropped_BV, 0.0))
