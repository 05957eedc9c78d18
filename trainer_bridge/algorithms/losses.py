"""Losses: pure functions of tensors. Axes: N tokens of the policy, of all samples of a pass.

Each returns a value per token [N]; the trainer divides the sum by the number of tokens of the whole update, so that the
result does not depend on how an update is split into passes. Log-probabilities are in nats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from torch import Tensor

from .catalogue import Algorithm


class PolicyLoss(NamedTuple):
    """Loss of each token [N], and which tokens are clipped [N]."""

    loss_N: Tensor
    clipped_N: Tensor


def clipped_policy_loss(logp_N: Tensor, old_logp_N: Tensor, advantage_N: Tensor, *, clip: float) -> PolicyLoss:
    """PPO's clipped surrogate (Schulman et al. 2017), per token.

        ratio = exp(logp - old_logp)
        loss  = -min(ratio * A, clamp(ratio, 1 - clip, 1 + clip) * A)

    Args:
        logp_N: Log-probabilities of the sampled tokens now; carries gradient.
        old_logp_N: Log-probabilities at the time of sampling; no gradient.
        advantage_N: Advantages, normalised if required; no gradient.
        clip: Half-width of the clipping range around ratio 1.
    """
    ratio_N = (logp_N - old_logp_N).exp()
    free_N = ratio_N * advantage_N
    held_N = ratio_N.clamp(1 - clip, 1 + clip) * advantage_N
    return PolicyLoss(-free_N.minimum(held_N), (held_N < free_N).detach())


def reinforce_loss(logp_N: Tensor, advantage_N: Tensor) -> PolicyLoss:
    """REINFORCE (Williams 1992), per token: ``loss = -logp * A``. Only correct for samples of the current policy."""
    return PolicyLoss(-logp_N * advantage_N, (logp_N != logp_N).detach())


def value_loss(value_N: Tensor, return_N: Tensor) -> Tensor:
    """Return half the squared error of the critic, per turn."""
    return 0.5 * (value_N - return_N).square()


def kl_estimate(logp_N: Tensor, reference_logp_N: Tensor) -> Tensor:
    """KL(policy, reference), the k3 estimate (Schulman 2020), per token: ``exp(d) - d - 1`` with d = ref - logp.

    It is never negative, and unbiased for samples of the policy.
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
"""The functions for `catalogue.LOSSES`. Each takes log-probabilities now and at sampling time, and advantages."""
