"""Ratios of the policy to the old policy, and reductions over a turn or a rollout. N tokens; nats."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

from .parts import Segments, Tokens
from .terms import bounded_exp

if TYPE_CHECKING:
    from torch import Tensor

RatioUnit: TypeAlias = Literal["token", "turn", "rollout"]
Mean: TypeAlias = Literal["product", "geometric"]


def ratio_needs(unit: RatioUnit) -> frozenset[str]:
    """Return the needs of a loss with ratios of this unit: ratios of a rollout need rollouts that are one sample."""
    return frozenset({"sequences"}) if unit == "rollout" else frozenset()


def log_ratio(tokens: Tokens, unit: RatioUnit) -> Tensor:
    """Return log(policy / old) of each token, or its mean over the token's turn or rollout.

    A mean is the value only; the gradient is that of the token's own log-probability (GSPO-token, Zheng et al. 2025,
    section 4.3), so that advantages may differ within a rollout. If they do not, the sum over the rollout of its
    tokens' gradients is that of GSPO.
    """
    own_N = tokens.logp_N - tokens.old_logp_N
    if unit == "token":
        return own_N
    mean_N = total(own_N.detach(), tokens.segments, unit, mean=True)
    return mean_N + tokens.logp_N - tokens.logp_N.detach()


def sampler_ratio(
    old_N: Tensor, sampled_N: Tensor, segments: Segments, unit: RatioUnit = "token", mean: Mean = "product"
) -> Tensor:
    """Return trainer / sampler for each token, or the product or geometric mean over its turn or rollout.

    The log-ratio, or its sum or mean, is between -20 and 20 nats.
    """
    log_ratio_N = old_N - sampled_N
    if unit != "token":
        log_ratio_N = total(log_ratio_N, segments, unit, mean=mean == "geometric")
    return bounded_exp(log_ratio_N)


def total(value_N: Tensor, segments: Segments, unit: Literal["turn", "rollout"], *, mean: bool = False) -> Tensor:
    """Return for each token the sum, or the mean, of the values of its turn or rollout. Gradients pass."""
    key_N = segments.rollout_N
    if unit == "turn":
        key_N = key_N * (int(segments.turn_N.max()) + 1 if len(key_N) else 1) + segments.turn_N
    place_N = _places(key_N)
    size_M = place_N.bincount()
    sum_M = value_N.new_zeros(len(size_M)).index_add(0, place_N, value_N)
    return (sum_M / size_M if mean else sum_M)[place_N]


def _places(key_N: Tensor) -> Tensor:
    """Return the number of each key, from 0, in the order of the keys."""
    sorted_N, order_N = key_N.sort()
    is_new_N = sorted_N.new_zeros(len(sorted_N))
    is_new_N[1:] = sorted_N[1:] != sorted_N[:-1]
    return is_new_N.new_empty(len(is_new_N)).scatter(0, order_N, is_new_N.cumsum(0))
