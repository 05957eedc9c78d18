"""Groups of episodes: play every task several times, in waves that share one gate, and repeat void episodes.

The episodes of a wave may meet at a `Lockstep`, so that turn k of all running episodes reaches the engine at the same
time and forms one batch. The same weights then reproduce the same episodes bit by bit. The next wave begins as soon as
no episode needs the engine, while the graders of earlier waves may still run.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import anyio
from anyio.abc import TaskGroup

from envkit.protocols import Engine, EnvHost, Gate, QueueingHost, Renderer
from envkit.types import Group, RolloutRequest, SamplingParams, StopReason, Task, Trajectory, stable_hash

from .gates import Lockstep, OpenGate
from .play import RolloutLimits, play

_PlayOne: TypeAlias = Callable[[RolloutRequest, Gate, Callable[[], None]], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True)
class Rollout:
    """Plays groups of episodes.

    Attributes:
        host: Runs the environments.
        engine: Samples the completions.
        renderer: Converts observations to prompts, and completions to actions.
        limits: Limits of each episode.
        num_envs: Maximum number of concurrent episodes, unless the capacity of the host is lower. Episodes that are
            being graded do not count.
        num_graders: Maximum number of episodes that are being graded when a wave begins; None means no limit. A grader
            itself never waits, since its episode may hold a sandbox that another one needs.
    """

    host: EnvHost
    engine: Engine
    renderer: Renderer
    limits: RolloutLimits
    num_envs: int
    num_graders: int | None = None

    async def groups(
        self,
        tasks: Sequence[Task],
        group_size: int,
        *,
        phase: str,
        temperature: float,
        seed: int,
        on_begin: Callable[[RolloutRequest], None] | None = None,
        on_episode: Callable[[Trajectory], None] | None = None,
        skip: Container[tuple[int, int]] = (),
    ) -> RolloutResult:
        """Play every task `group_size` times.

        Args:
            tasks: Tasks to play.
            group_size: Episodes per task.
            phase: Name of this call, unique in the run; the keys of the episodes begin with it.
            temperature: Sampling temperature; 0 is greedy.
            seed: Sampling seed. The seed of a turn is derived from it, the index of the task, the index of the episode
                in its group, the turn, and the number of earlier attempts if the last one missed a deadline: an action
                that hangs the environment is not simply repeated.
            on_begin: Called with each episode that begins, also before a retry.
            on_episode: Called with each episode that ends, finished or void.
            skip: Episodes to omit, as pairs of the index of the task and the index in its group.

        Returns:
            One group per task, in order. Groups include the episodes that are void after all retries.
        """
        params = SamplingParams(temperature=temperature, max_tokens=self.limits.turn_tokens, stop=self.renderer.stop)

        def request_of(index: int, member: int) -> RolloutRequest:
            group, own = f"{phase}/{index:08d}", replace(params, seed=stable_hash(seed, index, member))
            return RolloutRequest(f"{group}/{member:04d}", tasks[index], member, own, group=group)

        numbers = [(index, member) for index in range(len(tasks)) for member in range(group_size)]
        requests = {number: request_of(*number) for number in numbers if number not in skip}
        played: dict[str, Trajectory] = {}
        graded = anyio.Condition()
        unfinished = 0

        async def one(request: RolloutRequest, gate: Gate, on_played: Callable[[], None]) -> None:
            nonlocal unfinished
            unfinished += 1
            if on_begin is not None:
                on_begin(request)
            trajectory = await play(
                self.host, self.engine, self.renderer, self.limits, request, gate, on_played=on_played
            )
            unfinished -= 1
            async with graded:
                graded.notify_all()
            played[request.key] = trajectory
            if on_episode is not None:
                on_episode(trajectory)

        waiting = list(requests.values())
        void: list[Trajectory] = []
        for _ in range(self.limits.retries + 1):
            started = 0
            async with anyio.create_task_group() as running:
                while started < len(waiting):
                    # Read the capacity for each wave, because a fleet may have shrunk since the last wave.
                    size = max(1, min(self.num_envs, self.host.capacity))
                    await self._wave(running, waiting[started : started + size], one)
                    started += size
                    async with graded:
                        while self.num_graders is not None and unfinished > self.num_graders:
                            await graded.wait()
            lost = [request for request in waiting if played[request.key].stop.is_void]
            void += [played[request.key] for request in lost]
            waiting = [_retry(request, played[request.key].stop) for request in lost]
            if not waiting:
                break
        members: list[list[Trajectory]] = [[] for _ in tasks]
        for (index, _), request in requests.items():
            members[index].append(played[request.key])
        groups = tuple(Group(task, tuple(some)) for task, some in zip(tasks, members, strict=True))
        return RolloutResult(groups, tuple(void))

    async def _wave(self, running: TaskGroup, requests: Sequence[RolloutRequest], one: _PlayOne) -> None:
        """Play a wave in `running`; return when its episodes need the engine no longer. Some may still be graded."""
        # An episode with a slot arrives within the time that a reset and a step may take.
        limits, host = self.limits, self.host
        lockstep = Lockstep(
            len(requests),
            timeout_s=limits.timeout_s + (limits.reset_timeout_s or limits.timeout_s),
            queued=(lambda: host.queued) if isinstance(host, QueueingHost) else None,
        )
        # An engine that does not repeat gains nothing if its episodes wait for the longest completion of their wave.
        gate: Gate = lockstep if self.engine.repeats else OpenGate()
        left, all_played = len(requests), anyio.Event()

        def on_played() -> None:
            nonlocal left
            left -= 1
            if not left:
                all_played.set()

        for request in requests:
            running.start_soon(one, request, gate, on_played)
        await all_played.wait()


def _retry(request: RolloutRequest, stop: StopReason) -> RolloutRequest:
    """Return the next attempt at a request whose last attempt was void and ended with `stop`."""
    attempt, params = request.attempt + 1, request.params
    if stop in (StopReason.TIMEOUT, StopReason.NO_COMPLETION):
        params = replace(params, seed=stable_hash(params.seed, "attempt", attempt))
    return replace(request, attempt=attempt, params=params)


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
        return [*(one for one in self.trajectories if not one.stop.is_void), *self.void]

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
