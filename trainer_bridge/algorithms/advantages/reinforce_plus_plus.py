"""REINFORCE++: returns, normalised over the tokens of the batch."""

from __future__ import annotations

from typing import Literal

from envkit.config.algorithm import AdvantageSection
from envkit.config.grammar import Share

from ..parts import Advantages, Part, Rollouts
from ..returns import discounted_returns, rows_by, standardised, steps_of


class ReinforcePlusPlus(AdvantageSection):
    """The return from a token on, normalised over all tokens of the batch."""

    kind: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    gamma: Share = 1.0
    """Discount factor per token."""
    baseline: Literal["none", "group"] = "none"
    """group: the return of the whole episode, less the mean of its group, instead of that from the token on."""


def reinforce_plus_plus(rollouts: Rollouts, section: ReinforcePlusPlus) -> Advantages:
    """Return (G - mean) / (deviation + 1e-6) over all tokens, where G is the return from the token on.

    Tokens of tools are no steps. With the KL divergence in the rewards, G has the divergence of the token and of those
    after it. With the baseline, G is the return of the whole episode, less the mean of its group; tokens of groups of
    one have the advantage 0 and no part in the normalisation.
    """
    steps = steps_of(rollouts, "token")
    return_ES = discounted_returns(steps.total(rollouts.token_reward_N), steps.mask_ES, gamma=section.gamma)
    compared_E = steps.mask_ES[:, 0] > 0
    if section.baseline == "group":
        for rows in rows_by(rollouts.groups):
            return_ES[rows] = return_ES[rows, :1] - return_ES[rows, 0].mean()
            compared_E[rows] &= len(rows) > 1
    return_N, compared_N = steps.spread(return_ES), compared_E[steps.rollout_N]
    advantage_N = return_N.new_zeros(return_N.shape)
    advantage_N[compared_N] = standardised(return_N[compared_N])
    return Advantages(advantage_N.float())


PART = Part(
    reinforce_plus_plus,
    ReinforcePlusPlus,
    lambda section: frozenset({"groups"} if section.baseline == "group" else ()),
    "Hu et al. 2025, REINFORCE++",
)
