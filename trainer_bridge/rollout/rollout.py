"""Groups of episodes: play every task several times, and repeat void episodes.

Episodes begin as soon as there is room, but those of a player that repeats begin in waves, whose episodes meet at a
`Lockstep`: turn k of all running episodes reaches the engine at the same time and forms one batch. The same weights
then reproduce the same episodes bit by bit. Graders of earlier episodes may still run when others begin.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace

import anyio

from envkit.errors import leaves
from envkit.protocols import EnvHost, Gate, Player
from envkit.types import Group, RolloutRequest, StopReason, Task, Trajectory, stable_hash

from .episode import RolloutLimits, play
from .gates import Lockstep, OpenGate


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

        numbers = [(index, member) for index in range(len(tasks)) for member in range(group_size)]
        requests = {number: request_of(*number) for number in numbers if number not in skip}
        last: dict[str, Trajectory] = {}
        void: list[Trajectory] = []

        def ended(trajectory: Trajectory) -> None:
            last[trajectory.key] = trajectory
            if on_episode is not None:
                on_episode(trajectory)

        waiting = list(requests.values())
        for _ in range(self.limits.retries + 1):
            try:
                await self._play(waiting, on_begin or (lambda request: None), ended)
            except ExceptionGroup as errors:  # raise the first error itself, with its own cause
                first = next(leaves(errors))
                raise first from first.__cause__
            lost = [request for request in waiting if last[request.key].is_void]
            void += [last[request.key] for request in lost]
            waiting = [_retry(request, last[request.key].outcome.stop) for request in lost]
            if not waiting:
                break
        members: list[list[Trajectory]] = [[] for _ in tasks]
        for (index, _), request in requests.items():
            members[index].append(last[request.key])
        groups = tuple(Group(task, tuple(some)) for task, some in zip(tasks, members, strict=True))
        return RolloutResult(groups, tuple(void))

    async def _play(
        self,
        requests: Sequence[RolloutRequest],
        on_begin: Callable[[RolloutRequest], None],
        on_end: Callable[[Trajectory], None],
    ) -> None:
        """Play each request once."""
        host, player, limits = self.host, self.player, self.limits
        acting = started = 0
        changed = anyio.Event()

        async def one(request: RolloutRequest, gate: Gate) -> None:
            on_begin(request)
            on_end(await play(host, player, limits, request, gate, on_played=played))

        def played() -> None:
            nonlocal acting, changed
            acting -= 1
            changed.set()
            changed = anyio.Event()

        async with anyio.create_task_group() as running:
            while started < len(requests):
                # Read the capacity each time, because a fleet may have shrunk.
                size = max(1, min(self.num_envs, host.capacity))
                is_busy = acting > 0 if player.repeats else acting >= size
                if is_busy:
                    await changed.wait()
                    continue
                some = requests[started : started + (size if player.repeats else 1)]
                gate: Gate = OpenGate()
                if player.repeats:
                    # An episode with a slot arrives within the time that a reset and a step may take.
                    timeout_s = limits.step_timeout_s + (limits.reset_timeout_s or limits.step_timeout_s)
                    gate = Lockstep(len(some), timeout_s=timeout_s, queued=lambda: host.queued)
                acting, started = acting + len(some), started + len(some)
                for request in some:
                    running.start_soon(one, request, gate)


def _retry(request: RolloutRequest, stop: StopReason) -> RolloutRequest:
    """Return the next attempt at a request whose last attempt was void and ended with `stop`."""
    attempt, seed = request.attempt + 1, request.seed
    if stop in (StopReason.TIMEOUT, StopReason.NO_COMPLETION):
        seed = stable_hash(seed, "attempt", attempt)
    return replace(request, attempt=attempt, seed=seed)


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

    def by_name(self, names: Sequence[str]) -> dict[str, RolloutResult]:
        """Return the part of the result that belongs to each name.

        Args:
            names: Name of each group, such as that of its environment. Empty: the result is empty.
        """
        named = list(zip(names, self.groups, strict=True)) if names else []
        name_of = {group.task.key: name for name, group in named}
        return {
            name: replace(
                self,
                groups=tuple(group for one, group in named if one == name),
                void=tuple(trajectory for trajectory in self.void if name_of[trajectory.task.key] == name),
            )
            for name in sorted({*names})
        }
