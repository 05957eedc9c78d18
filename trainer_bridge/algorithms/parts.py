"""Parts of an algorithm: what they are given, what they return, and what they need.

Axes: E episodes (rollouts), T turns (padded), K critics, N policy tokens. Log-probabilities are in nats. Neither this
module nor one with a part imports torch, because reading a training file imports them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from envkit.config.grammar import Section
from envkit.types import StopReason

if TYPE_CHECKING:
    from torch import Tensor


NEEDS = ("groups", "recomputed", "reference", "on_policy", "whole_rollouts", "sequences", "advantages")


@dataclass(frozen=True, slots=True)
class Part:
    """A part of an algorithm. A package outside envkit provides one by an entry point of the family's group.

    Attributes:
        function: An advantage maps `Rollouts` to `Advantages`, a loss `Tokens` to a `PolicyLoss`. An aggregation maps
            the `Segments` of an update to the weight of each token's loss [N], and a correction maps the recomputed and
            the sampled log-probabilities [N] and their `Segments` to a factor of each token's loss [N]. The last
            argument is an instance of `section`. None of the results has a gradient, except that of a loss.
        section: Class of its section in the training file. It extends the family's class in `envkit.config.algorithm`.
        needs: What it needs, of: ``critics:K``, ``groups`` (of at least two episodes), ``recomputed`` (old
            log-probabilities of the trainer), ``reference`` (a reference policy), ``on_policy`` (one update per train
            step), ``whole_rollouts`` (a pass has all samples of a rollout), ``sequences`` (a rollout is one sample) and
            ``advantages`` (the loss is 0 where the advantage is 0, so that such samples need no pass).
        source: Where it comes from.
    """

    function: Callable[..., Any]
    section: type[Section]
    needs: frozenset[str] = frozenset()
    source: str = ""

    def __post_init__(self) -> None:
        if unknown := {need for need in self.needs if need not in NEEDS and not re.fullmatch(r"critics:[1-9]", need)}:
            raise ValueError(f"unknown needs: {', '.join(sorted(unknown))}; there are: critics:K, {', '.join(NEEDS)}")


class Segments(NamedTuple):
    """What each of N tokens belongs to: the numbers of its rollout, of its sample, and of its turn in the rollout."""

    rollout_N: Tensor
    sample_N: Tensor
    turn_N: Tensor


@dataclass(frozen=True, slots=True)
class Rollouts:
    """The inputs of an advantage: the E episodes of a train step, which have N policy tokens in all.

    Attributes:
        reward_ET: Reward of each turn.
        turn_mask_ET: 1 for turns of the episode, 0 for padding.
        value_KET: The estimate of each of K critics at the start of each turn; K is 0 without a critic.
        observation_ET: Hash of the observation that each turn answers; 0 where it is unknown.
        groups: Key of each episode's group [E].
        stops: Why each episode ended [E]; None where it is unknown.
        segments: Of the N tokens.
        sampled_logp_N: Log-probabilities that the engine recorded.
        old_logp_N: Log-probabilities that ratios are relative to; see `algorithm.old_logprobs`.
        reference_logp_N: Log-probabilities under the reference policy; None without one.
    """

    reward_ET: Tensor
    turn_mask_ET: Tensor
    value_KET: Tensor
    observation_ET: Tensor
    groups: Sequence[str]
    stops: Sequence[StopReason | None]
    segments: Segments
    sampled_logp_N: Tensor
    old_logp_N: Tensor
    reference_logp_N: Tensor | None = None

    def spread(self, advantage_ET: Tensor) -> Tensor:
        """Return an advantage for each token [N]: that of its turn."""
        return advantage_ET[self.segments.rollout_N, self.segments.turn_N]


class Advantages(NamedTuple):
    """A number for each token [N], and each critic's target at each turn [K, E, T], or None without a critic."""

    advantage_N: Tensor
    target_KET: Tensor | None = None


class Tokens(NamedTuple):
    """The inputs of a loss, for N tokens of a pass. Only `logp_N` and `entropy_N` may have a gradient.

    Attributes:
        logp_N: Log-probabilities under the current policy.
        old_logp_N, sampled_logp_N, reference_logp_N: See `Rollouts`.
        entropy_N: Entropy of the distribution that the token was chosen from, in nats.
        advantage_N: Advantages.
        segments: What the tokens belong to.
    """

    logp_N: Tensor
    old_logp_N: Tensor
    sampled_logp_N: Tensor
    reference_logp_N: Tensor | None
    entropy_N: Tensor
    advantage_N: Tensor
    segments: Segments


class PolicyLoss(NamedTuple):
    """The loss of each token [N], and further values per token [N], whose means the trainer reports by name."""

    loss_N: Tensor
    metrics: Mapping[str, Tensor] = {}
