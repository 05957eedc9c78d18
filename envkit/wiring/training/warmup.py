"""The warm-up: the policy imitates demonstrations or dialogues until it succeeds on enough validation levels."""

from __future__ import annotations

import math
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import TypeVar

import anyio

from envkit import clock
from envkit.config import RunConfig, WarmupSection
from envkit.errors import UsageError
from envkit.local_host import SlotHost
from envkit.protocols import Expert
from envkit.registry import EnvSpec
from envkit.runs.display import Display
from envkit.trainer_bridge.evaluation.evaluator import success_of, valid
from envkit.trainer_bridge.render import ChatRenderer
from envkit.trainer_bridge.rollout import PolicyPlayer, Rollout
from envkit.trainer_bridge.warmup import demonstrations
from envkit.trainer_bridge.warmup.demonstrations import Demonstration, Lesson, Teacher
from envkit.trainer_bridge.warmup.dialogues import read_dialogues
from envkit.trainer_bridge.warmup.warmup import Imitator, LessonBook, Stage
from envkit.trainer_bridge.weights.channel import WeightChannel
from envkit.types import JSON, Sample, Task, stable_hash
from envkit.wiring import environments
from envkit.wiring.training.policy import Policy
from envkit.wiring.training.resolve import is_tiny, limits_of, parts_of, task_in, task_of

_PART = 64
"""Number of episodes to prepare between two updates of the display."""
_SAVE_EVERY = 100
"""Number of updates between two checkpoints."""
_CHECK_EVERY = 25
"""Maximum number of updates between two validations of the stage that may end early."""
_HAZARD_SHARE = 0.5
"""Share of single-turn samples whose state is hazardous, so that a careless move loses."""
_EPISODE_RANDOM_SHARE = 0.65
"""Share of random moves in the demonstrated episodes of a tiny policy."""
_STATES_PER_EPISODE = 4
"""An episode counts as this many samples of an update."""

_T = TypeVar("_T")


async def warm_up(
    run: RunConfig,
    specs: Sequence[EnvSpec],
    policy: Policy,
    imitator: Imitator,
    display: Display,
    *,
    save: Callable[[], Awaitable[None]],
) -> dict[str, JSON]:
    """Train the policy to imitate the experts of its environments, or the dialogues of a file.

    An expert plays its demonstrations in this process without a sandbox, because no output of a policy is executed. If
    the warm-up is cancelled, it saves a checkpoint before it ends.

    Args:
        run: The resolved training file.
        specs: The environment of each section of `run.envs`.
        policy: The policy to train.
        imitator: Trains the policy. An imitator that was restored from a checkpoint continues at that checkpoint.
        display: Shows progress.
        save: Function that writes a checkpoint.

    Returns:
        Values for the summary: the number of updates in each stage, the duration in seconds (only since the last
        restart), and the success rates of the demonstrated episodes and of the policy's last validation.

    Raises:
        ConfigError: The environment does not support the configured demonstrations.
        UsageError: The file of dialogues cannot be used, or the model has no chat template.
    """
    began = clock.stopwatch()
    try:
        async with environments.slots(run.num_envs) as host:
            stages = _Stages(run, specs, policy, imitator, host, display, save)
            facts = await (stages.dialogues() if run.warmup.kind == "dialogues" else stages.demonstrations())
    except anyio.get_cancelled_exc_class():
        with anyio.CancelScope(shield=True):
            await save()
        raise
    return {**facts, "greedy_validation": stages.greedy, "wall_s": round(clock.stopwatch() - began, 1)}


class _Stages:
    """The stages of a warm-up and their shared state.

    Attributes:
        greedy: Success rate of greedy play (temperature 0) at the last validation; None before the first validation.
    """

    def __init__(
        self,
        run: RunConfig,
        specs: Sequence[EnvSpec],
        policy: Policy,
        imitator: Imitator,
        host: SlotHost,
        display: Display,
        save: Callable[[], Awaitable[None]],
    ) -> None:
        self._run = run
        self._specs = specs
        self._policy = policy
        self._host = host
        self._display = display
        self._section: WarmupSection = run.warmup
        self._imitator = imitator
        self._save = save
        self.greedy: float | None = None
        self._checks = 0

    async def dialogues(self) -> dict[str, JSON]:
        """Train on the dialogues of the file; return the numbers of dialogues, skipped dialogues and updates."""
        section, limit = self._section, self._run.rollout.max_tokens
        renderer = self._policy.renderer
        if not isinstance(renderer, ChatRenderer):
            raise UsageError("warmup.kind: dialogues need a model with a chat template; name one in engine.model")
        self._display.phase("read dialogues", 1)
        path = Path(_filled(section.file))
        read = await clock.to_thread(partial(read_dialogues, path, renderer, max_tokens=limit))
        if read.skipped:
            count = len(read.samples) + read.skipped
            self._display.announce(
                f"skipped {read.skipped} of {count} dialogues, which are longer than rollout.max_tokens ({limit})"
            )
        size = _filled(section.batch)
        updates = read.updates(size, section.dialogue_epochs)
        stage = Stage(updates, size, _filled(section.learning_rate))
        self._begin("dialogues", [stage])
        batch = read.batches(size, stable_hash(self._run.seed, "dialogues"))
        made = await self._imitator.run(stage, batch, after=self._after(stage, validates=True))
        return {"dialogues": len(read.samples), "dialogues_skipped": read.skipped, "dialogue_updates": made}

    async def demonstrations(self) -> dict[str, JSON]:
        """Imitate the experts on separate states, then on whole episodes. Return the entries for the summary."""
        experts = [environments.open_expert(section.id, section.options) for section in self._run.envs]
        lessons = await self._lessons(experts)
        episodes, success = await self._episodes(experts)
        return {"single_turn_updates": lessons, "episode_updates": episodes, "demonstrator_success": success}

    def _teacher(self, expert: Expert, noise: float) -> Teacher:
        is_bare = self._section.answers == "bare"
        return Teacher(expert, self._policy.renderer, noise, is_bare, limits_of(self._run.rollout).turn_tokens)

    def _parts(self, total: int, seed: int) -> Iterator[tuple[int, int, Iterator[Task]]]:
        """Divide `total` by weight. Yield for each environment its index, its part of `total`, and its tasks."""
        parts = zip(self._run.envs, self._specs, parts_of(self._run, total), strict=True)
        for index, (section, spec, part) in enumerate(parts):
            yield index, part, map(partial(task_in, section, spec, "train", seed), count())

    async def _lessons(self, experts: Sequence[Expert]) -> int:
        """Train on samples of one state each, then of several states as turns; return the total number of updates."""
        section, display, imitator = self._section, self._display, self._imitator
        size, rate = _filled(section.batch), _filled(section.learning_rate)
        counts = (_filled(section.single_turn_updates), _filled(section.multi_turn_updates))
        stages = [Stage(updates, size, rate, number=number) for number, updates in enumerate(counts) if updates]
        total = sum(stage.updates for stage in stages)
        if total == 0 or imitator.stage > stages[-1].number:
            return total
        seed = stable_hash(self._run.seed, "lessons")
        needed = _filled(section.single_turn_states)
        display.phase("prepare lessons", needed)
        states: list[Lesson] = []
        for index, part, tasks in self._parts(needed, seed):
            teacher = self._teacher(experts[index], section.random_share)
            states += await demonstrations.lessons(self._host, teacher, tasks, part, seed, on_lesson=display.advance)
        noise = section.random_share if is_tiny(self._run) else 0.0
        book = LessonBook(states, _HAZARD_SHARE, noise, seed)
        self._begin("lessons", stages)
        updates = 0
        for stage in stages:
            turns = section.multi_turn_states if stage.number else 1
            validates = stage is stages[-1] and not section.episode_updates
            batches = book.batches(stage.batch, states=turns)
            updates += await imitator.run(stage, batches, after=self._after(stage, validates=validates))
        return updates

    async def _episodes(self, experts: Sequence[Expert]) -> tuple[int, float | None]:
        """Train on whole episodes of the experts; return the number of updates and the success rate, if it is known."""
        section, display = self._section, self._display
        has_tiny = is_tiny(self._run)
        size = max(1, _filled(section.batch) // _STATES_PER_EPISODE)
        rate = _filled(section.learning_rate) / (2 if has_tiny else 1)
        random_share = _EPISODE_RANDOM_SHARE if has_tiny else 0.0
        stage = Stage(_filled(section.episode_updates), size, rate, number=2)
        needed = stage.updates * size
        if not needed:
            return 0, None
        seed = stable_hash(self._run.seed, "episodes")
        episodes: list[Demonstration] = []
        display.phase("prepare episodes", needed)
        for index, part, tasks in self._parts(needed, seed):
            teacher, end = self._teacher(experts[index], random_share), len(episodes) + part
            while len(episodes) < end:
                played = await demonstrations.demonstrations(
                    self._host,
                    teacher,
                    tasks,
                    min(_PART, end - len(episodes)),
                    stable_hash(seed, len(episodes)),
                    limits_of(self._run.rollout),
                )
                episodes += played
                display.advance(len(played))
        if len(experts) > 1:
            random.Random(seed).shuffle(episodes)
        self._begin("episodes", [stage])

        def batch(update: int) -> Sequence[Sample]:
            return [sample for one in episodes[update * size : (update + 1) * size] for sample in one.samples]

        updates = await self._imitator.run(stage, batch, after=self._after(stage, validates=True))
        known = [one.success for one in episodes if one.success is not None]
        return updates, sum(known) / len(known) if known else None

    def _begin(self, name: str, stages: Sequence[Stage]) -> None:
        """Show the start of a phase. If the run was restarted, the updates from before the restart count as done."""
        self._display.phase(name, sum(stage.updates for stage in stages))
        done = sum(stage.updates for stage in stages if stage.number < self._imitator.stage)
        if self._imitator.stage in [stage.number for stage in stages]:
            done += self._imitator.updates
        self._display.advance(max(0, done - 1))

    def _after(self, stage: Stage, *, validates: bool) -> Callable[[int, float], Awaitable[bool]]:
        """Return the function to call after each update of `stage`; it returns whether the stage should end.

        If `validates`, the stage ends as soon as the success rate of greedy play reaches `warmup.greedy_goal`.
        """
        section = self._section
        validates = validates and bool(section.check_episodes)
        every = min(_CHECK_EVERY, math.ceil(stage.updates / 2))

        async def after(update: int, loss: float) -> bool:
            is_due = validates and (update % every == 0 or update == stage.updates)
            if is_due:
                self.greedy = await self._greedy()
            await self._count(loss, **({"greedy": f"{self.greedy:.3f}"} if self.greedy is not None else {}))
            return is_due and self.greedy is not None and self.greedy >= section.greedy_goal

        return after

    async def _count(self, loss: float, **shown: float | str) -> None:
        """Show one finished update, and save a checkpoint every `_SAVE_EVERY` updates.

        After a restart, the last update before it is shown again, but without its loss, which is unknown (NaN).
        """
        known = {} if math.isnan(loss) else {"imitation loss": f"{loss:.3f}", **shown}
        self._display.advance(1, **known)
        if known and self._imitator.updates % _SAVE_EVERY == 0:
            await self._save()

    async def _greedy(self) -> float:
        """Return the success rate of greedy play on validation levels, which training and evaluation never use."""
        run, policy = self._run, self._policy
        await WeightChannel(policy.trainer, policy.engine).push()
        limits = limits_of(run.rollout)
        rollout = Rollout(self._host, PolicyPlayer(policy.engine, policy.renderer, limits), limits, run.num_envs)
        seed = stable_hash(run.seed, "validation")
        levels = range(_filled(run.warmup.check_episodes))
        tasks = [task_of(run, self._specs, "validation", seed, number) for number in levels]
        self._checks += 1
        phase = f"validation-{self._checks}"
        result = await rollout.groups(tasks, 1, phase=phase, temperature=0.0, seed=0)
        return success_of(valid(result.trajectories))


def _filled(value: _T | None) -> _T:
    """Return `value`, the value of an optional key, for which `resolve` has set a default."""
    assert value is not None, "resolve fills it in"
    return value
