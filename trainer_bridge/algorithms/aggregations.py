"""Aggregations: the weight of each token's loss in an update."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from envkit.config.algorithm import AggregationSection
from envkit.config.grammar import Count

from .parts import Part, Segments

if TYPE_CHECKING:
    from torch import Tensor


class TokenMean(AggregationSection):
    """The mean over tokens: a long episode counts more than a short one."""

    kind: Literal["token_mean"] = "token_mean"


def token_mean(segments: Segments, section: TokenMean) -> Tensor:
    """Return 1 / N for each of N tokens, in float64."""
    size = len(segments.rollout_N)
    return segments.rollout_N.new_ones(size).double() / max(size, 1)


TOKEN_MEAN = Part(token_mean, TokenMean, source="Yu et al. 2025, DAPO, section 3.3")


class RolloutMean(AggregationSection):
    """The mean over the tokens of each episode, then over episodes: all episodes count the same."""

    kind: Literal["rollout_mean"] = "rollout_mean"


def rollout_mean(segments: Segments, section: RolloutMean) -> Tensor:
    """Return 1 / (rollouts * tokens of the token's rollout) for each token, in float64.

    An episode that was split into several samples is one rollout.
    """
    size_E = segments.rollout_N.bincount()
    return 1.0 / (size_E[segments.rollout_N].double() * max(int((size_E > 0).sum()), 1))


ROLLOUT_MEAN = Part(rollout_mean, RolloutMean, source="Shao et al. 2024, DeepSeekMath, equation 3")


class PromptMean(AggregationSection):
    """The mean over the tokens of each group, then over groups: all tasks count the same."""

    kind: Literal["prompt_mean"] = "prompt_mean"


def prompt_mean(segments: Segments, section: PromptMean) -> Tensor:
    """Return 1 / (groups * tokens of the token's group) for each token, in float64."""
    size_G = segments.group_N.bincount()
    return 1.0 / (size_G[segments.group_N].double() * max(int((size_G > 0).sum()), 1))


PROMPT_MEAN = Part(prompt_mean, PromptMean, source="Khatri et al. 2025, The Art of Scaling RL Compute (ScaleRL)")


class Constant(AggregationSection):
    """The sum over the tokens of each episode, divided by a constant, then the mean over episodes."""

    kind: Literal["constant"] = "constant"
    tokens: Count = 1
    """The constant, such as the maximum number of tokens of an episode. 1: the plain sum."""


def constant(segments: Segments, section: Constant) -> Tensor:
    """Return 1 / (rollouts * constant) for each token, in float64. Unlike those of means, the sum is not 1."""
    rollouts = int((segments.rollout_N.bincount() > 0).sum())
    return segments.rollout_N.new_ones(len(segments.rollout_N)).double() / (max(rollouts, 1) * section.tokens)


CONSTANT = Part(
    constant, Constant, source="Liu et al. 2025, Understanding R1-Zero-Like Training (Dr. GRPO), section 3.2"
)
