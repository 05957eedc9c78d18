"""Groups of given tasks, each played once: evaluation, checks, demonstrations.

Episodes begin as soon as there is room, but those of a player that repeats begin in waves, whose episodes meet at a
`Lockstep`: turn k of all running episodes reaches the engine at the same time and forms one batch. The same weights
then reproduce the same episodes bit by bit. Graders of earlier episodes may still run when others begin.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field, replace

from envkit.errors import leaves
from envkit.protocols import EnvHost, Player
from envkit.types import Group, RolloutRequest, Task, Trajectory, stable_hash

from ..rollout.episode import RolloutLimits
from .cursor import Place
from .groups import GroupState
from .scheduler import Plan, Scheduler


@dataclass(frozen=True, slots=True)
class Rollout:
    """Plays groups of episodes.

    Attributes:
        num_envs: Maximum number of concurrent episodes, unless the capacity of the host is lower. Episodes that are
            being graded do not count.
    """

    host: EnvHost
    player: Player
    limits: RolloutLimits
    num_envs: int

    async def groups(
        self,
        tasks: Sequence[Task],
        group_size: int = 1,
        *,
        phase: str,
        seed: int,
        temperature: float = 1.0,
        on_begin: Callable[[RolloutRequest], None] | None = None,
        on_episode: Callable[[Trajectory], None] | None = None,
        skip: Container[tuple[int, int]] = (),
        seed_of: Callable[[int, int], int] | None = None,
    ) -> RolloutResult:
        """Play every task `group_size` times.

        Args:
            tasks: Tasks to play.
            group_size: Episodes per task.
            phase: Name of this call, unique in the run; the keys of the episodes begin with it.
            seed: Seed of the player. The seed of an episode is derived from it, the index of the task, the index of
                the episode in its group, and the number of earlier attempts if the last one missed a deadline: an
                action that hangs the environment is not simply repeated.
            temperature: Sampling temperature; 0 is greedy.
            on_begin: Called with each episode that begins, also before a retry.
            on_episode: Called with each episode that ends, finished or void.
            skip: Episodes to omit, as pairs of the index of the task and the index in its group.
            seed_of: Returns the seed of an episode from such a pair, instead of the usual derivation from `seed`.

        Returns:
            One group per task, in order. Groups include the episodes that are void after all retries.
        """

        def request_of(index: int, member: int) -> RolloutRequest:
            group = f"{phase}/{index:08d}"
            own_seed = stable_hash(seed, index, member) if seed_of is None else seed_of(index, member)
            key = f"{group}/{member:04d}"
            return RolloutRequest(key, tasks[index], member, own_seed, temperature, group=group, index=index)

        requests = [
            [request_of(index, member) for member in range(group_size) if (index, member) not in skip]
            for index in range(len(tasks))
        ]
        plan = _Once(
            iter(
                GroupState(Place(index, 0, index), tuple(members), len(members))
                for index, members in enumerate(requests)
                if members
            ),
            self.player.repeats,
            on_begin or (lambda request: None),
            on_episode or (lambda trajectory: None),
        )
        try:
            await Scheduler(self.host, self.player, self.limits, self.num_envs, plan).run(until_idle=True)
        except ExceptionGroup as errors:  # raise the first error itself, with its own cause
            first = next(leaves(errors))
            raise first from first.__cause__
        groups = tuple(plan.groups.get(index, Group(task, ())) for index, task in enumerate(tasks))
        void = sorted(plan.void, key=lambda one: (one.attempt, one.key))
        return RolloutResult(groups, tuple(void))


@dataclass(slots=True)
class _Once(Plan):
    """Opens all groups at once."""

    requests: Iterator[GroupState]
    in_lockstep: bool
    on_begin: Callable[[RolloutRequest], None]
    on_end: Callable[[Trajectory], None]
    groups: dict[int, Group] = field(default_factory=dict)
    void: list[Trajectory] = field(default_factory=list)
    version: int = 0

    def next_group(self) -> GroupState | None:
        return next(self.requests, None)

    def began(self, request: RolloutRequest) -> None:
        self.on_begin(request)

    def ended(self, trajectory: Trajectory, *, is_needed: bool) -> None:
        if trajectory.is_void:
            self.void.append(trajectory)
        self.on_end(trajectory)

    def completed(self, group: GroupState) -> None:
        self.groups[group.place.number] = group.group()


@dataclass(frozen=True, slots=True)
class RolloutResult:
    """The results of a rollout.

    Attributes:
        groups: One per task, in order.
        void: All void attempts, including attempts whose retry succeeded.
    """

    groups: tuple[Group, ...]
    void: tuple[Trajectory, ...]

    @property
    def trajectories(self) -> list[Trajectory]:
        """The episodes of all groups, in order."""
        return [trajectory for group in self.groups for trajectory in group.trajectories]

    @property
    def attempts(self) -> list[Trajectory]:
        """Every attempt once: the episodes that finished, then the void ones."""
        return [*(one for one in self.trajectories if not one.is_void), *self.void]

    def by_name(self, name_of: Callable[[int], str]) -> dict[str, RolloutResult]:
        """Return the part of the result that belongs to each name, such as that of an environment.

        Args:
            name_of: Returns the name that belongs to `Trajectory.index`.
        """
        names = {name_of(one.index) for one in (*self.trajectories, *self.void)}
        return {
            name: replace(
                self,
                groups=tuple(
                    group
                    for group in self.groups
                    if group.trajectories and name_of(group.trajectories[0].index) == name
                ),
                void=tuple(trajectory for trajectory in self.void if name_of(trajectory.index) == name),
            )
            for name in sorted(names)
        }
