"""Generalised advantage estimates over turns or tokens."""

from __future__ import annotations

from typing import Literal

from envkit.config.algorithm import AdvantageSection
from envkit.config.grammar import Share

from ..parts import Advantages, Part, Rollouts
from ..returns import by_turn, gae_of, normalised, steps_of


class Gae(AdvantageSection):
    """Generalised advantage estimates, normalised over the batch; with a critic."""

    kind: Literal["gae"] = "gae"
    unit: Literal["turn", "token"] = "turn"
    """A step: a turn of the policy, or one of its tokens. The critic estimates a value for each."""
    gamma: Share = 1.0
    """Discount factor per step. Use 1 for tokens."""
    gae_lambda: Share = 0.95
    """0 relies on the critic alone, 1 on the observed returns."""
    bootstrap: bool = True
    """Whether the state after an episode that a limit cut off has the value that the critic estimates after its last
    token; otherwise, its value is 0, as after an episode that the environment ended or a grader graded."""


def gae(rollouts: Rollouts, section: Gae) -> Advantages:
    """Return generalised advantage estimates, normalised over all steps; the targets are A + V.

        delta[t] = r[t] + gamma * V[t+1] - V[t]
        A[t]     = delta[t] + gamma * lambda * A[t+1]

    Step t + 1 is the next turn that has policy tokens, or the next such token: tokens of tools are no steps. The value
    after the last step is 0; see `Gae.bootstrap`.
    """
    steps = steps_of(rollouts, section.unit)
    value_N = rollouts.spread(rollouts.value_KET[0]) if rollouts.value_KN is None else rollouts.value_KN[0]
    value_ES = steps.of(value_N)
    stops = rollouts.stops if section.bootstrap else ()
    advantage_ES = gae_of(
        *(steps.total(rollouts.token_reward_N), value_ES, steps.mask_ES, rollouts.after_KE[0].double(), stops),
        gamma=section.gamma,
        gae_lambda=section.gae_lambda,
    )
    target_N = steps.spread(advantage_ES + value_ES).float()
    target = target_N if section.unit == "token" else by_turn(rollouts, target_N)
    return Advantages(steps.spread(normalised(advantage_ES, steps.mask_ES)), target[None])


PART = Part(
    gae,
    Gae,
    lambda section: frozenset({"critics:1", "token_values"} if section.unit == "token" else {"critics:1"}),
    "Schulman et al. 2016, High-Dimensional Continuous Control",
)
