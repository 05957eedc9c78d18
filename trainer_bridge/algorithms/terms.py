"""Terms that several losses use. Axes: N tokens or turns, V vocabulary. Log-probabilities are in nats."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Bound on a log-ratio (nats), beyond which the exponential function would overflow or dwarf all other tokens."""


def value_loss(value_N: Tensor, return_N: Tensor) -> Tensor:
    """Return half the squared error of the critic's value for each turn."""
    return 0.5 * (value_N - return_N).square()


def kl_estimate(logp_N: Tensor, reference_logp_N: Tensor) -> Tensor:
    """Return the k3 estimate of KL(policy, reference) per token: ``exp(d) - d - 1`` with d = ref - logp.

    The estimate (Schulman 2020) is never negative, and is unbiased for on-policy samples. Its gradient is another
    matter: as a loss on such samples it descends, in expectation, KL(reference, policy).
    """
    difference_N = (reference_logp_N - logp_N).clamp(-10.0, 10.0)
    return difference_N.expm1() - difference_N  # exp() - 1 would lose all digits of a small difference


def entropy(logp_NV: Tensor) -> Tensor:
    """Return the entropy of each distribution over the vocabulary V, in nats [N]."""
    return -(logp_NV.exp() * logp_NV).sum(-1)
