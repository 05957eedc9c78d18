"""The mean over rollouts of the mean over their tokens."""

from __future__ import annotations

from typing import Literal

from envkit.config.algorithm import AggregationSection

from ..parts import Part, Segments, Tensor


class RolloutMean(AggregationSection):
    """The mean over the tokens of each episode, then over episodes: all episodes count the same."""

    kind: Literal["rollout_mean"] = "rollout_mean"


def rollout_mean(segments: Segments, section: RolloutMean) -> Tensor:
    """Return 1 / (rollouts * tokens of the token's rollout) for each token, in float64.

    An episode that was split into several samples is one rollout.
    """
    size_E = segments.rollout_N.bincount()
    return 1.0 / (size_E[segments.rollout_N].double() * max(int((size_E > 0).sum()), 1))


PART = Part(rollout_mean, RolloutMean, source="Shao et al. 2024, DeepSeekMath, equation 3")
