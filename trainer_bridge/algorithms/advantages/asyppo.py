"""AsyPPO: two critics that learn from different episodes, and what their disagreement is used for."""

from __future__ import annotations

from typing import Literal

from envkit.config.grammar import Share

from ..parts import Advantages, Part, Rollouts, Tensor
from ..returns import EPSILON, by_turn, normalised, steps_of
from .gae import GaeKeys, estimates


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
    advantage_ES, target_N = estimates(rollouts, section, steps, value_ES, after_E)
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


PART = Part(
    asyppo,
    Asyppo,
    frozenset({"critics:2", "groups"}),
    "Liu et al. 2025, Asymmetric Proximal Policy Optimization: mini-critics boost LLM reasoning",
)
