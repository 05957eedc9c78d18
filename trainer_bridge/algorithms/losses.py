"""Losses: pure functions of tensors. Axes: N tokens that the policy sampled, of all samples in a pass.

Each policy loss has a value per token [N]. The trainer divides the sum of these values by the number of tokens in the
whole update, so the result does not depend on how the update is split into passes. Log-probabilities are in nats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from torch import Tensor

from .catalogue import Algorithm


class PolicyLoss(NamedTuple):
    """The loss of each token [N], and whether each token's probability ratio (new to old policy) is clipped [N]."""

    loss_N: Tensor
    clipped_N: Tensor


def clipped_policy_loss(logp_N: Tensor, old_logp_N: Tensor, advantage_N: Tensor, *, clip: float) -> PolicyLoss:
    """Return PPO's clipped surrogate loss (Schulman et al. 2017), per token.

        ratio = exp(logp - old_logp)
        loss  = -min(ratio * A, clamp(ratio, 1 - clip, 1 + clip) * A)

    Args:
        logp_N: Log-probabilities of the sampled tokens under the current policy, with a gradient.
        old_logp_N: Log-probabilities of the same tokens at sampling time, without a gradient.
        advantage_N: Advantages, normalised if required, without a gradient.
        clip: Half-width of the clipping range around ratio 1.
    """
    ratio_N = (logp_N - old_logp_N).exp()
    free_N = ratio_N * advantage_N
    held_N = ratio_N.clamp(1 - clip, 1 + clip) * advantage_N
    return PolicyLoss(-free_N.minimum(held_N), (held_N < free_N).detach())


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


def _clipped(logp_N: Tensor, old_logp_N: Tensor, advantage_N: Tensor, algorithm: Algorithm) -> PolicyLoss:
    return clipped_policy_loss(logp_N, old_logp_N, advantage_N, clip=algorithm.clip)


def _reinforce(logp_N: Tensor, old_logp_N: Tensor, advantage_N: Tensor, algorithm: Algorithm) -> PolicyLoss:
    return reinforce_loss(logp_N, advantage_N)


BY_NAME: Mapping[str, Callable[[Tensor, Tensor, Tensor, Algorithm], PolicyLoss]] = {
    "clipped": _clipped,
    "reinforce": _reinforce,
}
"""The functions for the names in `catalogue.LOSSES`.

Their arguments are log-probabilities under the current policy, those at sampling time, advantages, and the algorithm.
"""
