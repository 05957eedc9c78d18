"""Rollouts: play tasks with the policy and return trajectories.

Every episode runs in its own async task, which leases an environment, resets it, and then alternates between generating
an action and stepping the environment. Episodes that run concurrently form a wave. `Lockstep` synchronises them, so
that turn k of all running episodes reaches the engine at the same time and forms one batch. The sampling seed of a turn
depends only on the rollout's seed and the indices of task, episode and turn. With the same seed, the same weights thus
reproduce the same episodes bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import anyio

from envkit import clock
from envkit.errors import (
    DeadlineError,
    EnvError,
    SandboxLostError,
    SessionBrokenError,
    SessionNotFoundError,
    UnreachableError,
)
from envkit.metrics import Fold, fold_infos
from envkit.protocols import Engine, EnvHost, Episode, Renderer
from envkit.types import (
    Cause,
    Exchange,
    Group,
    Info,
    Prompt,
    Reset,
    SamplingParams,
    Step,
    StopReason,
    Task,
    Trajectory,
    Turn,
    stable_hash,
)


@dataclass(frozen=True, slots=True)
class RolloutLimits:
    """Limits of an episode.

    Attributes:
        max_turns: Maximum number of turns.
        max_tokens: Maximum total length in tokens of a turn's prompt and completion. The prompt contains all earlier
            turns, unless the renderer limits the history.
        turn_tokens: Maximum number of tokens of a completion.
        timeout_s: Maximum seconds that a reset or a step may take. If one takes longer, its episode is void.
        retries: Maximum number of times that a void episode is played again.
    """

    max_turns: int
    max_tokens: int
    turn_tokens: int
    timeout_s: float
    retries: int


@dataclass(frozen=True, slots=True)
class Rollout:
    """Plays groups of episodes.

    Attributes:
        host: Runs the environments.
        engine: Samples the completions.
        renderer: Converts observations to prompts, and completions to actions.
        limits: Limits of each episode.
        num_envs: Maximum number of concurrent episodes, unless the capacity of the host is lower.
    """

    host: EnvHost
    engine: Engine
    renderer: Renderer
    limits: RolloutLimits
    num_envs: int

    async def groups(
        self,
        tasks: Sequence[Task],
        group_size: int,
        *,
        temperature: float,
        seed: int,
        on_episode: Callable[[Trajectory], None] | None = None,
        skip: Container[tuple[int, int]] = (),
    ) -> RolloutResult:
        """Play every task `group_size` times.

        Args:
            tasks: Tasks to play.
            group_size: Episodes per task.
            temperature: Sampling temperature; 0 is greedy.
            seed: Sampling seed of the rollout. Each turn has its own seed, derived from this one, the index of the
                task, the index of the episode in the task's group, and the index of the turn.
            on_episode: Called with the trajectory of each attempt that ends, even if it is void and will be retried.
            skip: Episodes not to play: pairs of a task's index and an episode's index in the group of this task.

        Returns:
            One group per task, in the order of `tasks`. Episodes that are void after all retries remain in their group.
        """
        params = SamplingParams(temperature=temperature, max_tokens=self.limits.turn_tokens, stop=self.renderer.stop)
        waiting = [
            _Play(task, index, member, replace(params, seed=stable_hash(seed, index, member)))
            for index, task in enumerate(tasks)
            for member in range(group_size)
            if (index, member) not in skip
        ]
        plays = list(waiting)
        void: list[Trajectory] = []
        for attempt in range(self.limits.retries + 1):
            started = 0
            while started < len(waiting):
                # Read the host's capacity for each wave, because a fleet may have shrunk since the last wave.
                size = max(1, min(self.num_envs, self.host.capacity))
                await self._wave(waiting[started : started + size], on_episode)
                started += size
            waiting = [play for play in waiting if play.trajectory().stop.is_void]
            void += [play.trajectory() for play in waiting]
            if not waiting or attempt == self.limits.retries:
                break
            for play in waiting:
                play.restart()
        members: list[list[Trajectory]] = [[] for _ in tasks]
        for play in plays:
            members[play.index].append(play.trajectory())
        groups = tuple(Group(task, tuple(some)) for task, some in zip(tasks, members, strict=True))
        return RolloutResult(groups, tuple(void))

    async def _wave(self, plays: Sequence[_Play], on_episode: Callable[[Trajectory], None] | None) -> None:
        # An episode in a slot reaches the barrier within a reset and a step, which take at most `timeout_s` each.
        lockstep = Lockstep(len(plays), timeout_s=2 * self.limits.timeout_s)
        async with anyio.create_task_group() as tasks:
            for play in plays:
                tasks.start_soon(self._play, play, lockstep, on_episode)

    async def _play(self, play: _Play, lockstep: Lockstep, on_episode: Callable[[Trajectory], None] | None) -> None:
        arrived = False
        try:
            async with self.host.lease(play.task) as episode:
                lockstep.arrive()
                arrived = True
                await self._turns(play, episode, lockstep)
        except TimeoutError:
            play.end(StopReason.TIMEOUT, error=f"no answer within {self.limits.timeout_s:g} s")
        except DeadlineError as error:
            play.end(StopReason.TIMEOUT, error=str(error))
        except (SandboxLostError, UnreachableError, SessionBrokenError, SessionNotFoundError) as error:
            cause = error.cause if isinstance(error, SandboxLostError) else None
            play.end(StopReason.SANDBOX_LOST, error=str(error), cause=cause)
        except EnvError as error:
            play.end(StopReason.ENV_ERROR, error=str(error))
        finally:
            lockstep.leave(arrived=arrived)
            self.engine.forget(play.session)
        if on_episode is not None:
            on_episode(play.trajectory())

    async def _turns(self, play: _Play, episode: Episode, lockstep: Lockstep) -> None:
        limits = self.limits
        with anyio.fail_after(limits.timeout_s):
            start = play.start = await episode.reset()
        folds = start.info.get("metrics")
        play.folds = cast("dict[str, Fold]", folds) if isinstance(folds, dict) else {}
        history: list[Exchange] = []
        observation = start.observation
        prompt = Prompt(self.renderer.open(observation))
        while True:
            if prompt.starts_sample:
                play.ids = []
                # The engine's cached tokens are not a prefix of the new prompt, so they are useless.
                self.engine.forget(play.session)
            if len(play.ids) + len(prompt.ids) + limits.turn_tokens > limits.max_tokens:
                return play.end(StopReason.MAX_TOKENS)
            play.ids += prompt.ids
            await lockstep.together()
            began = clock.now()
            params = replace(play.params, seed=stable_hash(play.params.seed, len(play.turns)))
            completion = await self.engine.generate(play.ids, params, session=play.session)
            play.ids += completion.token_ids
            action = self.renderer.action(completion.token_ids)
            generated = clock.now()
            with anyio.fail_after(limits.timeout_s):
                step = await episode.step(action)
            seconds = (generated - began, clock.now() - generated)
            turn = Turn(prompt.ids, completion, action, step, *seconds, starts_sample=prompt.starts_sample)
            play.turns.append(turn)
            if step.terminated or step.truncated:
                return play.end(StopReason.TERMINATED if step.terminated else StopReason.TRUNCATED)
            if len(play.turns) == limits.max_turns:
                return play.end(StopReason.MAX_TURNS)
            history.append(Exchange(observation, completion.token_ids))
            observation = step.observation
            prompt = self.renderer.extend(history, observation)


@dataclass(frozen=True, slots=True)
class RolloutResult:
    """The results of a rollout.

    Attributes:
        groups: One group per task, in the order of the tasks.
        void: The trajectories of all void attempts, including attempts whose retry was not void.
    """

    groups: tuple[Group, ...]
    void: tuple[Trajectory, ...]

    @property
    def trajectories(self) -> list[Trajectory]:
        """The trajectories of all groups, in order."""
        return [trajectory for group in self.groups for trajectory in group.trajectories]


class Lockstep:
    """A barrier at which the episodes of a wave wait for each other before each turn, by calling `together`.

    An episode that has not called `arrive` may be waiting for a slot of the host that an episode at the barrier uses.
    The wait for episodes that have not arrived is therefore limited.

    Args:
        expected: Number of episodes in the wave.
        timeout_s: Maximum seconds to wait for episodes that have not arrived.
    """

    def __init__(self, expected: int, *, timeout_s: float) -> None:
        self._expected = expected
        self._timeout_s = timeout_s
        self._present = 0
        self._waiting = 0
        self._gate = anyio.Event()

    def arrive(self) -> None:
        """Register an episode. From now on, the other episodes wait for it at each turn, without a time limit."""
        self._expected -= 1
        self._present += 1

    def leave(self, *, arrived: bool) -> None:
        """Stop waiting for an episode that has ended. `arrived` is whether the episode has called `arrive`."""
        if arrived:
            self._present -= 1
        else:
            self._expected -= 1
        self._open_if_all()

    async def together(self) -> None:
        """Wait until every other episode of the wave has called this method or `leave`.

        After `timeout_s` seconds, stop waiting for episodes that have not called `arrive`.
        """
        self._waiting += 1
        gate = self._gate
        self._open_if_all()
        try:
            if self._expected > 0:
                with anyio.move_on_after(self._timeout_s):
                    await gate.wait()
                if not gate.is_set():
                    self._timeout_s = 0.0
                    self._open_if_all()
            await gate.wait()
        except BaseException:
            if not gate.is_set():
                self._waiting -= 1
            raise

    def _open_if_all(self) -> None:
        complete = self._expected <= 0 or self._timeout_s <= 0
        if complete and self._waiting and self._waiting >= self._present:
            self._gate.set()
            self._gate = anyio.Event()
            self._waiting = 0


@dataclass(slots=True)
class _Play:
    """An episode in progress."""

    task: Task
    index: int
    member: int
    params: SamplingParams
    ids: list[int] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    folds: dict[str, Fold] = field(default_factory=dict)
    stop: StopReason | None = None
    error: str | None = None
    cause: Cause | None = None
    start: Reset | None = None

    @property
    def session(self) -> str:
        """Name of the episode's session in the engine. The alphabetical order of names is the order of the episodes."""
        return f"{self.index:08d}.{self.member:04d}"

    def end(self, stop: StopReason, error: str | None = None, cause: Cause | None = None) -> None:
        self.stop, self.error, self.cause = stop, error, cause

    def restart(self) -> None:
        self.ids, self.turns, self.stop, self.error, self.cause, self.start = [], [], None, None, None, None

    def trajectory(self) -> Trajectory:
        assert self.stop is not None, "the episode has ended"
        steps: list[Step] = [turn.step for turn in self.turns if turn.step is not None]
        infos: list[Info] = [step.info for step in steps]
        return Trajectory(
            task=self.task,
            member=self.member,
            turns=tuple(self.turns),
            stop=self.stop,
            reward=sum(step.reward for step in steps),
            metrics=fold_infos(infos, self.folds),
            error=self.error,
            start=self.start,
            cause=self.cause,
        )
