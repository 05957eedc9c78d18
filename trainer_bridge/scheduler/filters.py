"""Filters: which complete groups are worth training on."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import pvariance
from typing import Protocol, runtime_checkable

from envkit.types import JSON, Group

_SPREAD = 1e-6
"""Smallest difference of returns that counts, relative to their size; smaller ones are rounding errors."""

_FIRST, _WINDOW = 20, 256
"""Number of first groups that are not compared with others, and of last groups that a group is compared with."""


class Filter(Protocol):
    """Decides whether a group is trained on. It sees each complete group once."""

    @property
    def name(self) -> str: ...

    def keeps(self, group: Group) -> bool:
        """Return whether the group is trained on; its void episodes say nothing."""
        ...


@runtime_checkable
class LearningFilter(Filter, Protocol):
    """A filter whose decisions depend on earlier groups, which checkpoints have in `state`."""

    def state(self) -> JSON: ...

    def restore(self, state: JSON) -> None: ...


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


@dataclass(slots=True)
class TopVariance:
    """Keeps the share of groups whose returns vary most, compared with the last groups (RAGEN); never one without any.

    `share`, in (0, 1], is the share of groups to keep.
    """

    share: float
    name: str = "top_variance"
    _seen: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))

    def keeps(self, group: Group) -> bool:
        own = pvariance(returns_of(group) or [0.0])
        self._seen.append(own)
        if not ZeroVariance().keeps(group):
            return False
        return len(self._seen) <= _FIRST or sum(one >= own for one in self._seen) <= self.share * len(self._seen)

    def state(self) -> JSON:
        return [*self._seen]

    def restore(self, state: JSON) -> None:
        assert isinstance(state, list), "state() wrote it"
        self._seen.extend(float(str(one)) for one in state)


def returns_of(group: Group) -> list[float]:
    """Return the returns of the valid episodes."""
    return [one.outcome.reward for one in group.trajectories if one.outcome.reward is not None]
