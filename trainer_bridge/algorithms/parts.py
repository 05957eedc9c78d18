"""Parts of an algorithm: what they are given, what they return, and what they need.

Axes: E episodes (rollouts), T turns (padded), K critics, N policy tokens. Log-probabilities are in nats. Neither this
module nor one with a part imports torch, because reading a training file imports them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from envkit.config.grammar import Section
from envkit.types import Sample, StopReason

if TYPE_CHECKING:
    import torch

Tensor: TypeAlias = "torch.Tensor"
"""For annotations only: see above."""

NEEDS = (
    *("groups", "recomputed", "reference", "on_policy", "whole_rollouts", "sequences", "advantages"),
    *("token_values", "entropy"),
)


@dataclass(frozen=True, slots=True)
class Part:
    """A part of an algorithm. A package outside envkit provides one by an entry point of the family's group.

    Attributes:
        function: An advantage maps `Rollouts` to `Advantages`, a loss `Tokens` to a `PolicyLoss`. An aggregation maps
            the `Segments` of an update to the weight of each token's loss [N], and a correction maps the recomputed and
            the sampled log-probabilities [N] and their `Segments` to a factor of each token's loss [N]. The last
            argument is an instance of `section`. None of the results has a gradient, except that of a loss.
        section: Class of its section in the training file. It extends the family's class in `envkit.config.algorithm`.
        needs: What it needs, or a function that maps its section to that, of: ``critics:K``, ``token_values`` (the
            critics estimate the value of each token, not of each turn), ``groups`` (of at least two episodes),
            ``recomputed`` (old log-probabilities of the trainer), ``reference`` (a reference policy), ``on_policy``
            (one update per train step), ``whole_rollouts`` (a pass has all samples of a rollout), ``sequences`` (a
            rollout is one sample), ``entropy`` (the entropies of `Tokens` have a gradient) and ``advantages`` (the
            loss is 0 where the advantage is 0, so that such samples need no pass).
        source: Where it comes from.
        prepare: Computes, once for a train step, what the loss needs of all tokens together, such as a rank: it maps
            `Rollouts`, the advantages [N] and the section to a value for each token [N], which is `Tokens.prepared_N`.
    """

    function: Callable[..., Any]
    section: type[Section]
    needs: frozenset[str] | Callable[[Any], frozenset[str]] = frozenset()
    source: str = ""
    prepare: Callable[..., Tensor] | None = None

    def needs_of(self, section: Any) -> frozenset[str]:
        """Return what it needs with these values of its keys.

        Raises:
            ValueError: A need is unknown.
        """
        needs = self.needs(section) if callable(self.needs) else self.needs
        if unknown := {need for need in needs if need not in NEEDS and not re.fullmatch(r"critics:[1-9]", need)}:
            raise ValueError(f"unknown needs: {', '.join(sorted(unknown))}; there are: critics:K, {', '.join(NEEDS)}")
        return needs


class Segments(NamedTuple):
    """What each of N tokens belongs to: the numbers of its rollout, of its sample, of its turn in the rollout, and of
    its rollout's group. The tokens of a sample are in their order; samples may be in any order.
    """

    rollout_N: Tensor
    sample_N: Tensor
    turn_N: Tensor
    group_N: Tensor


@dataclass(frozen=True, slots=True)
class Rollouts:
    """The inputs of an advantage: the E episodes of a train step, which have N policy tokens in all.

    Attributes:
        reward_ET: Reward of each turn, less the penalties of `algorithm.overlong` and `algorithm.kl`.
        turn_mask_ET: 1 for turns of the episode, 0 for padding.
        value_KET: The estimate of each of K critics at the start of each turn; K is 0 without a critic, or with
            ``token_values``.
        after_KE: The estimate of each critic after the last policy token of each episode.
        observation_ET: Hash of the observation that each turn answers; 0 where it is unknown.
        groups: Key of each episode's group [E].
        members: Index of each episode in its group [E].
        stops: Why each episode ended [E]; None where it is unknown, or a grade followed: then no reward is missing.
        segments: Of the N tokens.
        token_reward_N: The same rewards by token: that of a turn is at its last token. If a turn has no tokens, it is
            at the last token before, or else at the first one after.
        sampled_logp_N: Log-probabilities that the engine recorded.
        old_logp_N: Log-probabilities that ratios are relative to; see `algorithm.old_logprobs`.
        reference_logp_N: Log-probabilities under the reference policy; None without one.
        entropy_N: Entropies of the old policy (nats); None unless log-probabilities are recomputed.
        value_KN: The estimate of each critic before each token, with ``token_values``; None without.
        rewards: Rewards of each turn by name [E, T], from ``info["rewards"]`` of the steps.
        samples: The samples that have the tokens, in their order; empty if there are only numbers.
        model: The policy, for parts with a forward pass of their own; None if there are only numbers.
    """

    reward_ET: Tensor
    turn_mask_ET: Tensor
    value_KET: Tensor
    after_KE: Tensor
    observation_ET: Tensor
    groups: Sequence[str]
    members: Sequence[int]
    stops: Sequence[StopReason | None]
    segments: Segments
    token_reward_N: Tensor
    sampled_logp_N: Tensor
    old_logp_N: Tensor
    reference_logp_N: Tensor | None = None
    entropy_N: Tensor | None = None
    value_KN: Tensor | None = None
    rewards: Mapping[str, Tensor] = field(default_factory=dict)
    samples: Sequence[Sample] = ()
    model: Any = None

    def spread(self, advantage_ET: Tensor) -> Tensor:
        """Return an advantage for each token [N]: that of its turn."""
        return advantage_ET[self.segments.rollout_N, self.segments.turn_N]


class Advantages(NamedTuple):
    """A number for each token, and what the critics learn.

    Attributes:
        advantage_N: How much better each token was than expected.
        targets: Each critic's target at each turn [K, E, T], or at each token [K, N] with ``token_values``; a critic
            does not learn where it is nan. None without a critic.
        entropy_weight_N: Factor of each token's entropy bonus; None for 1.
    """

    advantage_N: Tensor
    targets: Tensor | None = None
    entropy_weight_N: Tensor | None = None


class Tokens(NamedTuple):
    """The inputs of a loss, for N tokens of a pass. Only `logp_N` and `entropy_N` may have a gradient.

    Attributes:
        logp_N: Log-probabilities under the current policy.
        old_logp_N, sampled_logp_N, reference_logp_N: See `Rollouts`.
        entropy_N: Entropy of the distribution that the token was chosen from, in nats.
        advantage_N: Advantages.
        segments: What the tokens belong to.
        prepared_N: What `Part.prepare` returned; None without it.
    """

    logp_N: Tensor
    old_logp_N: Tensor
    sampled_logp_N: Tensor
    reference_logp_N: Tensor | None
    entropy_N: Tensor
    advantage_N: Tensor
    segments: Segments
    prepared_N: Tensor | None = None


class PolicyLoss(NamedTuple):
    """The loss of each token [N], and further values per token [N], whose means the trainer reports by name."""

    loss_N: Tensor
    metrics: Mapping[str, Tensor] = {}
