"""The warm-up of a run: lessons, then whole episodes, until greedy play is good enough on validation levels."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from pathlib import Path

from envkit import clock
from envkit.config import RunConfig, WarmupSection
from envkit.protocols import Expert
from envkit.registry import EnvSpec
from envkit.trainer_bridge import demonstrations
from envkit.trainer_bridge.demonstrations import Teacher
from envkit.trainer_bridge.display import Display
from envkit.trainer_bridge.loop import success_of, valid
from envkit.trainer_bridge.rollout import Rollout
from envkit.trainer_bridge.warmup import Imitator, LessonBook, Stage
from envkit.types import JSON, Sample, Weights, stable_hash
from envkit.vector import SlotHost
from envkit.wiring import envs
from envkit.wiring.meanings import limits_of, task_of
from envkit.wiring.policy import Policy

_PART = 64
"""Lessons or episodes that are prepared between two looks at the display."""


async def warm_up(run: RunConfig, spec: EnvSpec, policy: Policy, weights: Path, display: Display) -> dict[str, JSON]:
    """Let the policy imitate its world's expert.

    The demonstrations are played in this process: nothing that a policy says is run here.

    Args:
        run: The resolved file.
        spec: Its environment.
        policy: Learns.
        weights: File through which the engine takes the weights before each look at validation levels.
        display: Shows progress.

    Returns:
        Facts for the summary: updates of each stage, seconds, and the success of the demonstrators themselves.
    """
    expert = envs.open_expert(run.env.id, run.env.options)
    began = clock.stopwatch()
    async with envs.slots(run.env.num_envs) as host:
        stages = _Stages(run, spec, policy, expert, host, weights, display)
        lessons = await stages.lessons()
        episodes, greedy = await stages.episodes()
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
        expert: Expert,
        host: SlotHost,
        weights: Path,
        display: Display,
    ) -> None:
        self._run = run
        self._spec = spec
        self._policy = policy
        self._expert = expert
        self._host = host
        self._display = display
        self._section: WarmupSection = run.warmup
        self._imitator = Imitator(
            policy.model, max_grad_norm=run.trainer.max_grad_norm, micro_tokens=run.trainer.micro_tokens
        )
        self._weights = weights
        self.demonstrator_success = 0.0

    async def lessons(self) -> int:
        """Run the first two stages and return their updates."""
        section, display = self._section, self._display
        if section.lesson_updates + section.strung_updates == 0:
            return 0
        teacher = Teacher(self._expert, self._policy.renderer, section.lesson_noise)
        seed = stable_hash(self._run.seed, "lessons")
        tasks = (task_of(self._run, self._spec, "train", seed, number) for number in count())
        display.phase("prepare lessons", section.lesson_states)
        states = await demonstrations.lessons(
            self._host, teacher, tasks, section.lesson_states, seed, on_lesson=display.advance
        )
        book = LessonBook(states, section.tricky_share, section.lesson_noise, seed)
        display.phase("lessons", section.lesson_updates + section.strung_updates)

        async def after(update: int, loss: float) -> bool:
            display.advance(1, **{"imitation loss": f"{loss:.3f}"})
            return False

        made = 0
        for updates, strung in ((section.lesson_updates, 1), (section.strung_updates, section.strung_lessons)):
            stage = Stage(updates, section.lesson_batch, section.learning_rate)
            made += await self._imitator.run(stage, book.batches(stage.batch, strung=strung), after=after)
        return made

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
            samples += [one.sample for one in played]
            won += sum(one.success for one in played)
            display.advance(len(played))
        self.demonstrator_success = won / max(needed, 1)
        greedy = 0.0
        stage = Stage(section.episode_updates, section.episode_batch, section.episode_learning_rate)
        display.phase("episodes", stage.updates)

        async def after(update: int, loss: float) -> bool:
            nonlocal greedy
            shown: dict[str, float | str] = {"imitation loss": f"{loss:.3f}"}
            due = update % section.check_every == 0 or update == stage.updates
            if due:
                greedy = await self._greedy()
            display.advance(1, **shown, greedy=f"{greedy:.3f}")
            return due and greedy >= section.greedy_goal

        def batch(update: int) -> Sequence[Sample]:
            return samples[update * stage.batch : (update + 1) * stage.batch]

        updates = await self._imitator.run(stage, batch, after=after)
        return updates, greedy

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
