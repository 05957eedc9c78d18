"""Generalised advantage estimates over turns or tokens."""

from __future__ import annotations

from typing import Literal

from envkit.config.algorithm import AdvantageSection
from envkit.config.grammar import Share

from ..parts import Advantages, Part, Rollouts, Tensor
from ..returns import Steps, by_turn, gae_of, normalised, steps_of


class GaeKeys(AdvantageSection):
    """The keys of `gae`, which advantages that extend it have, too."""

    gamma: Share = 1.0
    """Discount factor per step. Use 1 if steps are tokens."""
    gae_lambda: Share = 0.95
    """0 relies on estimated values alone, 1 on the observed returns."""
    bootstrap: bool = True
    """Whether the state after an episode that a limit cut off has the value that is estimated after its last token;
    otherwise, its value is 0, as after an episode that the environment ended or a grader graded."""


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
    advantage_ES, target_N = estimates(rollouts, section, steps, steps.of(value_N), rollouts.after_KE[0].double())
    target = target_N if section.unit == "token" else by_turn(rollouts, target_N)
    return Advantages(steps.spread(normalised(advantage_ES, steps.mask_ES)), target[None])


def estimates(
    rollouts: Rollouts, section: GaeKeys, steps: Steps, value_ES: Tensor, after_E: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the estimates [E, S], and the targets [N], for these values of the steps, and after the last one."""
    stops = rollouts.stops if section.bootstrap else ()
    advantage_ES = gae_of(
        *(steps.total(rollouts.token_reward_N), value_ES, steps.mask_ES, after_E, stops),
        gamma=section.gamma,
        gae_lambda=section.gae_lambda,
    )
    return advantage_ES, steps.spread(advantage_ES + value_ES).float()


PART = Part(
    gae,
    Gae,
    lambda section: frozenset({"critics:1", "token_values"} if section.unit == "token" else {"critics:1"}),
    "Schulman et al. 2016, High-Dimensional Continuous Control",
)
