"""How far episodes run ahead of the trainer, and the batches that it gets.

A version is the number of train steps whose weights were published, and a batch has the groups of one train step. With
`Pace.ahead` A, at most the groups of A + 1 batches are open, buffered or in training; a place among them is free again
when the weights of its batch are published. With `Pace.max_lag` L, no token trains more than L versions after its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from envkit.types import Group, Trajectory

from .filters import Filter
from .once import RolloutResult


class LagPolicy(StrEnum):
    """What keeps tokens from training more than `Pace.max_lag` versions after their own."""

    WAIT = "wait"
    """A batch is taken only if all groups that have tokens can still be used in time. Nothing is masked, and without
    filters nothing is dropped."""
    RESUME = "resume"
    """A batch is taken at once, and tokens that are too old are masked."""
    DROP = "drop"
    """Groups whose oldest token is too old are dropped and played again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How far the episodes run ahead of the trainer, and what a batch is.

    Attributes:
        steps: Number of train steps in the whole run.
        groups_per_step: Groups per batch.
        group_size: Valid episodes per group.
        group_extra: Episodes that are played in addition for each group. The last ones to end are aborted.
        least: Number of valid episodes that a group needs at least, when retries are used up.
        ahead: Batches that may be open, buffered or in training besides the next one.
        max_lag: Maximum lag of a token in versions; at least `ahead`.
        lag_policy: What happens to tokens that would be older.
        max_filtered: Batches' worth of rejected groups after which a batch is taken with the groups that there are.
    """

    steps: int
    groups_per_step: int
    group_size: int
    group_extra: int = 0
    least: int = 1
    ahead: int = 0
    max_lag: int = 0
    lag_policy: LagPolicy = LagPolicy.WAIT
    straggler: float | None = None
    fails_hangs: bool = False
    filters: Sequence[Filter] = ()
    max_filtered: float = 8.0
    temperature: float = 1.0
    seed: int = 0

    @property
    def refills(self) -> bool:
        """Whether other groups replace those that are void or rejected."""
        return bool(self.filters) or self.ahead > 0


@dataclass(frozen=True, slots=True)
class Batch(RolloutResult):
    """The groups of a train step, by number, and the void attempts that ended since the batch before.

    Attributes:
        version: Version that the batch trains.
        envs: Index of the environment of each group and void attempt, by `Trajectory.index`.
        aborted: Attempts that the scheduler aborted since the batch before.
        filtered: Groups that filters rejected since the batch before.
        wanted: Number of groups that a batch has; this one has fewer if groups are void or too many were rejected.
        group_s: Seconds from the opening of each group until it was complete.
        waited_s: Seconds that the trainer waited for it.
        engine_s: Seconds since the batch before in which at least one completion was in progress.
    """

    version: int = 0
    envs: Mapping[int, int] = field(default_factory=dict)
    aborted: tuple[Trajectory, ...] = ()
    filtered: tuple[Group, ...] = ()
    wanted: int = 0
    group_s: tuple[float, ...] = ()
    waited_s: float = 0.0
    engine_s: float = 0.0

    @property
    def attempts(self) -> list[Trajectory]:
        """Every attempt once: those that finished, also of rejected groups, then the void and the aborted ones."""
        rejected = [one for group in self.filtered for one in group.trajectories if not one.is_void]
        finished = [one for one in self.trajectories if not one.is_void]
        return [*finished, *rejected, *self.void, *self.aborted]

    @property
    def played(self) -> RolloutResult:
        """The groups with those that filters rejected: what the policy can do."""
        return RolloutResult((*self.groups, *self.filtered), self.void)
