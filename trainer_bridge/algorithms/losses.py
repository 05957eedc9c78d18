"""Losses: pure functions of tensors. Axes: N tokens that the policy sampled, of all samples in a pass.

Each policy loss has a value per token [N]. The trainer divides the sum of these values by the number of tokens in the
whole update, so the result does not depend on how the update is split into passes. Log-probabilities are in nats.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .catalogue import Algorithm

_MAX_LOG_RATIO = 20.0
"""Bound on the log-ratio (nats), beyond which the exponential function would overflow or dwarf all other tokens."""


class Tokens(NamedTuple):
    """The inputs of a loss function, for N tokens of the policy. Only `logp_N` has a gradient.

    Attributes:
        logp_N: Log-probabilities under the current policy.
        old_logp_N: Log-probabilities that the ratio is relative to; see `Algorithm.old_logprobs`.
        sampled_logp_N: Log-probabilities that the engine recorded.
        advantage_N: Advantages.
    """

    logp_N: Tensor
    old_logp_N: Tensor
    sampled_logp_N: Tensor
    advantage_N: Tensor


class PolicyLoss(NamedTuple):
    """The loss of each token [N], and whether each token's probability ratio (new to old policy) is clipped [N]."""

    loss_N: Tensor
    clipped_N: Tensor


def clipped_policy_loss(
    logp_N: Tensor, old_logp_N: Tensor, advantage_N: Tensor, *, clip: float, dual_clip: float = math.inf
) -> PolicyLoss:
    """Return PPO's clipped surrogate loss (Schulman et al. 2017), per token.

        ratio = exp(clamp(logp - old_logp, -20, 20))
        loss  = -min(ratio * A, clamp(ratio, 1 - clip, 1 + clip) * A)

    For A < 0, this loss grows with the ratio. `dual_clip` bounds it (Ye et al. 2020): loss <= dual_clip * abs(A).

    Args:
        logp_N: Log-probabilities of the sampled tokens under the current policy, with a gradient.
        old_logp_N: Log-probabilities of the same tokens at sampling time, without a gradient.
        advantage_N: Advantages, normalised if required, without a gradient.
        clip: Half-width of the clipping range around ratio 1.
        dual_clip: Maximum of the ratio for negative advantages, above 1.
    """
    difference_N = logp_N - old_logp_N
    whole_N = difference_N.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()
    ratio_N = torch.where(advantage_N < 0, whole_N.clamp(max=dual_clip), whole_N)
    free_N = ratio_N * advantage_N
    held_N = ratio_N.clamp(1 - clip, 1 + clip) * advantage_N
    clipped_N = (held_N < free_N) | (ratio_N < whole_N) | (difference_N.abs() > _MAX_LOG_RATIO)
    return PolicyLoss(-free_N.minimum(held_N), clipped_N.detach())


def reinforce_loss(logp_N: Tensor, advantage_N: Tensor) -> PolicyLoss:
    """Return REINFORCE's loss per token, ``-logp * A`` (Williams 1992). It requires on-policy samples."""
    return PolicyLoss(-logp_N * advantage_N, (logp_N != logp_N).detach())


def value_loss(value_N: Tensor, return_N: Tensor) -> Tensor:
    """Return half the squared error of the critic's value for each turn."""
    return 0.5 * (value_N - return_N).square()


def kl_estimate(logp_N: Tensor, reference_logp_N: Tensor) -> Tensor:
    """Return the k3 estimate of KL(policy, reference) per token: ``exp(d) - d - 1`` with d = ref - logp.

    The estimate (Schulman 2020) is never negative, and is unbiased for on-policy samples.
    """
    difference_N = (reference_logp_N - logp_N).clamp(-10.0, 10.0)
    return difference_N.exp() - difference_N - 1


def entropy(logp_NV: Tensor) -> Tensor:
    """Return the entropy of each distribution over the vocabulary V, in nats [N]."""
    return -(logp_NV.exp() * logp_NV).sum(-1)


def clipped(tokens: Tokens, algorithm: Algorithm) -> PolicyLoss:
    """The loss ``clipped``; see `clipped_policy_loss`."""
    logps = (tokens.logp_N, tokens.old_logp_N)
    return clipped_policy_loss(*logps, tokens.advantage_N, clip=algorithm.clip, dual_clip=algorithm.dual_clip)


def reinforce(tokens: Tokens, algorithm: Algorithm) -> PolicyLoss:
    """The loss ``reinforce``; see `reinforce_loss`."""
    return reinforce_loss(tokens.logp_N, tokens.advantage_N)
