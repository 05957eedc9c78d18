"""The warm-up of a run: lessons, then whole episodes, until greedy play is good enough on validation levels."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from itertools import count
from pathlib import Path

import anyio

from envkit import clock
from envkit.config import RunConfig, WarmupSection
from envkit.protocols import Expert
from envkit.registry import EnvSpec
from envkit.trainer_bridge.loop import success_of, valid
from envkit.trainer_bridge.rollout import Rollout
from envkit.trainer_bridge.run_folder.display import Display
from envkit.trainer_bridge.warmup import demonstrations
from envkit.trainer_bridge.warmup.demonstrations import Teacher
from envkit.trainer_bridge.warmup.warmup import Imitator, LessonBook, Stage
from envkit.types import JSON, Sample, Weights, stable_hash
from envkit.vector import SlotHost
from envkit.wiring import environments
from envkit.wiring.training.policy import Policy
from envkit.wiring.training.resolve import limits_of, task_of

_PART = 64
"""Lessons or episodes that are prepared between two looks at the display."""
_SAVE_EVERY = 100
"""Updates between two checkpoints."""


async def warm_up(
    run: RunConfig,
    spec: EnvSpec,
    policy: Policy,
    imitator: Imitator,
    weights: Path,
    display: Display,
    *,
    save: Callable[[], Awaitable[None]],
) -> dict[str, JSON]:
    """Let the policy imitate its world's expert.

    The demonstrations are played in this process: nothing that a policy says is run here. When it is cancelled, it
    saves first.

    Args:
        run: The resolved file.
        spec: Its environment.
        policy: Learns.
        imitator: Teaches it; goes on where it was, if it was restored.
        weights: File through which the engine takes the weights before each look at validation levels.
        display: Shows progress.
        save: Writes a checkpoint.

    Returns:
        Facts for the summary: updates of each stage, seconds of this part of the run, and the success of the
        demonstrators themselves.
    """
    expert = environments.open_expert(run.env.id, run.env.options)
    began = clock.stopwatch()
    try:
        async with environments.slots(run.env.num_envs) as host:
            stages = _Stages(run, spec, policy, imitator, expert, host, weights, display, save)
            lessons = await stages.lessons()
            episodes, greedy = await stages.episodes()
    except anyio.get_cancelled_exc_class():
        with anyio.CancelScope(shield=True):
            await save()
        raise
    return {
        "lesson_updates": lessons,
        "episode_updates": episodes,
        "greedy_validation": greedy,
        "demonstrator_success": stages.demonstrator_success,
        "wall_s": round(clock.stopwatch() - began, 1),
    }


class _Stages:
    """The stages and what they share."""

    def __init__(
        self,
        run: RunConfig,
        spec: EnvSpec,
        policy: Policy,
        imitator: Imitator,
        expert: Expert,
        host: SlotHost,
        weights: Path,
        display: Display,
        save: Callable[[], Awaitable[None]],
    ) -> None:
        self._run = run
        self._spec = spec
        self._policy = policy
        self._expert = expert
        self._host = host
        self._display = display
        self._section: WarmupSection = run.warmup
        self._imitator = imitator
        self._weights = weights
        self._save = save
        self.demonstrator_success = 0.0

    async def lessons(self) -> int:
        """Run the first two stages and return their updates."""
        section, display, imitator = self._section, self._display, self._imitator
        stages = [
            Stage(section.lesson_updates, section.lesson_batch, section.learning_rate, number=0),
            Stage(section.strung_updates, section.lesson_batch, section.learning_rate, number=1),
        ]
        total = sum(stage.updates for stage in stages)
        if total == 0 or imitator.stage > stages[-1].number:
            return total
        teacher = Teacher(self._expert, self._policy.renderer, section.lesson_noise)
        seed = stable_hash(self._run.seed, "lessons")
        tasks = (task_of(self._run, self._spec, "train", seed, number) for number in count())
        display.phase("prepare lessons", section.lesson_states)
        states = await demonstrations.lessons(
            self._host, teacher, tasks, section.lesson_states, seed, on_lesson=display.advance
        )
        book = LessonBook(states, section.tricky_share, section.lesson_noise, seed)
        display.phase("lessons", total)
        done = sum(stage.updates for stage in stages[: imitator.stage]) + imitator.updates
        display.advance(max(0, done - 1))

        async def after(update: int, loss: float) -> bool:
            await self._count(loss)
            return False

        for stage, strung in zip(stages, (1, section.strung_lessons), strict=True):
            await imitator.run(stage, book.batches(stage.batch, strung=strung), after=after)
        return total

    async def episodes(self) -> tuple[int, float]:
        """Run the last stage and return its updates and the greedy success that ended it."""
        section, display = self._section, self._display
        teacher = Teacher(self._expert, self._policy.renderer, section.episode_noise)
        seed = stable_hash(self._run.seed, "episodes")
        tasks = (task_of(self._run, self._spec, "train", seed, number) for number in count())
        needed = section.episode_updates * section.episode_batch
        samples: list[Sample] = []
        display.phase("prepare episodes", needed)
        won = 0
        while len(samples) < needed:
            played = await demonstrations.demonstrations(
                self._host,
                teacher,
                tasks,
                min(_PART, needed - len(samples)),
                stable_hash(seed, len(samples)),
                self._run.rollout.max_turns,
            )
            samples += [sample for one in played for sample in one.samples]
            won += sum(one.success for one in played)
            display.advance(len(played))
        self.demonstrator_success = won / max(needed, 1)
        greedy = 0.0
        stage = Stage(section.episode_updates, section.episode_batch, section.episode_learning_rate, number=2)
        display.phase("episodes", stage.updates)
        if self._imitator.stage == stage.number:
            display.advance(max(0, self._imitator.updates - 1))

        async def after(update: int, loss: float) -> bool:
            nonlocal greedy
            due = update % section.check_every == 0 or update == stage.updates
            if due:
                greedy = await self._greedy()
            await self._count(loss, greedy=f"{greedy:.3f}")
            return due and greedy >= section.greedy_goal

        def batch(update: int) -> Sequence[Sample]:
            return samples[update * stage.batch : (update + 1) * stage.batch]

        updates = await self._imitator.run(stage, batch, after=after)
        return updates, greedy

    async def _count(self, loss: float, **shown: float | str) -> None:
        """Show an update and save now and then; the loss of an update before a restart is not known."""
        known = {} if math.isnan(loss) else {"imitation loss": f"{loss:.3f}", **shown}
        self._display.advance(1, **known)
        if known and self._imitator.updates % _SAVE_EVERY == 0:
            await self._save()

    async def _greedy(self) -> float:
        """Success of greedy play on validation levels, which are neither trained nor evaluated on."""
        run, policy = self._run, self._policy
        await clock.to_thread(policy.write_weights, self._weights)
        await policy.engine.load(Weights(0, str(self._weights)))
        rollout = Rollout(self._host, policy.engine, policy.renderer, limits_of(run), run.env.num_envs)
        seed = stable_hash(run.seed, "validation")
        tasks = [task_of(run, self._spec, "validation", seed, number) for number in range(run.warmup.check_episodes)]
        result = await rollout.groups(tasks, 1, temperature=0.0, seed=0)
        return success_of(valid(result.trajectories))
