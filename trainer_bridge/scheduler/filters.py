"""Filters: which complete groups are worth training on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from envkit.types import Group

_SPREAD = 1e-6
"""Smallest difference of returns that counts, relative to their size; smaller ones are rounding errors."""


class Filter(Protocol):
    """Decides whether a group is trained on. It sees each complete group once."""

    @property
    def name(self) -> str: ...

    def keeps(self, group: Group) -> bool:
        """Return whether the group is trained on; its void episodes say nothing."""
        ...


@dataclass(frozen=True, slots=True)
class ZeroVariance:
    """Rejects groups whose returns are all equal, so that comparing them teaches nothing (DAPO)."""

    name: str = "zero_variance"

    def keeps(self, group: Group) -> bool:
        returns = returns_of(group)
        return bool(returns) and max(returns) - min(returns) > _SPREAD * max(1.0, max(map(abs, returns)))


@dataclass(frozen=True, slots=True)
class SuccessBand:
    """Keeps groups whose share of successful episodes is within bounds; groups without known success are kept."""

    low: float
    high: float
    name: str = "success_band"

    def keeps(self, group: Group) -> bool:
        known = [one.outcome.success for one in group.trajectories if one.outcome.success is not None]
        return not known or self.low <= sum(known) / len(known) <= self.high


def returns_of(group: Group) -> list[float]:
    """Return the returns of the valid episodes."""
    return [one.outcome.reward for one in group.trajectories if one.outcome.reward is not None]
