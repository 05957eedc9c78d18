"""Advantages with critics: generalised advantage estimates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from envkit.config.algorithm import AdvantageSection
from envkit.config.grammar import Share

from ..parts import Advantages, Part, Rollouts
from ..returns import EPSILON, Steps, by_turn, gae_of, normalised, steps_of

if TYPE_CHECKING:
    from torch import Tensor


class GaeKeys(AdvantageSection):
    """The keys of `gae`, which advantages that extend it have, too."""

    gamma: Share = 1.0
    """Discount factor per step. Use 1 for tokens."""
    gae_lambda: Share = 0.95
    """0 relies on the critic alone, 1 on the observed returns."""
    bootstrap: bool = True
    """Whether the state after an episode that a limit cut off has the value that the critic estimates after its last
    token; otherwise, its value is 0, as after an episode that the environment ended or a grader graded."""


class Gae(GaeKeys):
    """Generalised advantage estimates, normalised over the batch; with a critic."""

    kind: Literal["gae"] = "gae"
    unit: Literal["turn", "token"] = "turn"
    """A step: a turn of the policy, or one of its tokens. The critic estimates a value for each."""


def gae(rollouts: Rollouts, section: Gae) -> Advantages:
    """Return generalised advantage estimates, normalised over all steps; the targets are A + V.

        delta[t] = r[t] + gamma * V[t+1] - V[t]
        A[t]     = delta[t] + gamma * lambda * A[t+1]

    Step t + 1 is the next turn that has policy tokens, or the next such token: tokens of tools are no steps. The value
    after the last step is 0; see `Gae.bootstrap`.
    """
    steps = steps_of(rollouts, section.unit)
    value_N = rollouts.spread(rollouts.value_KET[0]) if rollouts.value_KN is None else rollouts.value_KN[0]
    advantage_ES, target_N = _estimates(rollouts, section, steps, steps.of(value_N), rollouts.after_KE[0].double())
    target = target_N if section.unit == "token" else by_turn(rollouts, target_N)
    return Advantages(steps.spread(normalised(advantage_ES, steps.mask_ES)), target[None])


def _estimates(
    rollouts: Rollouts, section: GaeKeys, steps: Steps, value_ES: Tensor, after_E: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the estimates [E, S], and the targets [N]."""
    stops = rollouts.stops if section.bootstrap else ()
    advantage_ES = gae_of(
        *(steps.total(rollouts.token_reward_N), value_ES, steps.mask_ES, after_E, stops),
        gamma=section.gamma,
        gae_lambda=section.gae_lambda,
    )
    return advantage_ES, steps.spread(advantage_ES + value_ES).float()


GAE = Part(
    gae,
    Gae,
    lambda section: frozenset({"critics:1", "token_values"} if section.unit == "token" else {"critics:1"}),
    "Schulman et al. 2016, High-Dimensional Continuous Control",
)


class Asyppo(GaeKeys):
    """Generalised advantage estimates over turns, with two critics."""

    kind: Literal["asyppo"] = "asyppo"
    mask_share: Share = 0.2
    """Share of the turns, those on which the critics agree most, whose advantage is 0."""
    entropy_mask_share: Share = 0.2
    """Share of the turns, those on which the critics agree least, whose tokens have no entropy bonus."""


def asyppo(rollouts: Rollouts, section: Asyppo) -> Advantages:
    """Return generalised advantage estimates (see `gae`) for V, the mean of the critics, normalised over all turns.

    The disagreement of the critics on a turn is the standard deviation of their values. With n turns, the advantage is
    0 on the floor(mask_share * n) turns with the least, and the factor of the entropy bonus is 0 on the
    floor(entropy_mask_share * n) with the most. Turns with the same disagreement as the next one are not masked, and so
    none is while the critics are equal. The target is A + V: for the first critic in the members 0, 2, ... of each
    group, for the second one in the others.
    """
    steps = steps_of(rollouts, "turn")
    value_ES = steps.of(rollouts.spread(rollouts.value_KET.double().mean(0)))
    after_E = rollouts.after_KE.double().mean(0)
    advantage_ES, target_N = _estimates(rollouts, section, steps, value_ES, after_E)
    is_step_ES = steps.mask_ES > 0
    apart_M = steps.of(rollouts.spread(rollouts.value_KET.double().std(0)))[is_step_ES]
    agrees_ES, differs_ES = ~is_step_ES, ~is_step_ES
    agrees_ES[is_step_ES] = _lowest(apart_M, section.mask_share)
    differs_ES[is_step_ES] = _lowest(-apart_M, section.entropy_mask_share)
    return Advantages(
        steps.spread(normalised(advantage_ES, steps.mask_ES) * ~agrees_ES),
        _sharded(by_turn(rollouts, target_N), rollouts),
        steps.spread((~differs_ES).float()),
    )


def _lowest(value_M: Tensor, share: float) -> Tensor:
    """Return whether each value is among the lowest floor(share * M), and below all others."""
    count = int(share * len(value_M) + EPSILON)
    if count == len(value_M):
        return value_M == value_M
    return value_M < value_M.sort().values[count]


def _sharded(target_ET: Tensor, rollouts: Rollouts) -> Tensor:
    """Return the target of each critic [2, E, T], with nan for the episodes that the other one learns from."""
    target_KET = target_ET.repeat(2, 1, 1)
    for row, member in enumerate(rollouts.members):
        target_KET[1 - member % 2, row] = float("nan")
    return target_KET


ASYPPO = Part(
    asyppo,
    Asyppo,
    frozenset({"critics:2", "groups"}),
    "Liu et al. 2025, Asymmetric Proximal Policy Optimization: mini-critics boost LLM reasoning",
)
