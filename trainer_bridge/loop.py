"""The training loop: imitates, then plays groups, updates and publishes the weights; evaluates, saves checkpoints.

This module does not import torch.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Protocol

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup, TaskStatus

from envkit import clock
from envkit.errors import EnvkitError, leaves
from envkit.protocols import PhasedTrainer, Trainer
from envkit.runs.display import Display, SilentDisplay
from envkit.runs.episodes import Decode, sample_episodes
from envkit.types import JSON, EpisodeRecord

from .diagnostics import Diagnostics, Finding, Probe, TrainStep
from .evaluation.evaluator import Evaluator, valid
from .models.saved_policy import SavedPolicy
from .run_folder import checkpoint
from .run_folder.checkpoint import RunState
from .run_folder.timeline import Span, durations, quantile_metrics, timeline
from .samples import samples_of
from .scheduler.accounting import last_actions, trained_sessions
from .scheduler.continuous import Continuous
from .scheduler.pace import Batch
from .scheduler.staleness import with_stale_ignored
from .sources.source import Source
from .step_metrics import schedule_metrics, step_metrics, waiting_metrics, why_no_samples
from .stopping import Stop
from .weights.channel import Push, WeightChannel

_SAVE_EVERY = 100
"""Number of updates of imitation between two checkpoints."""
_CHECK_EVERY = 25
"""Maximum number of updates between two validations of a phase of imitation that may end early."""
_STALL_S, _STALL_FACTOR = 60.0, 5.0
"""A wait for episodes is reported after this many seconds, and this many times the median wait."""


class Record(Protocol):
    """Stores the results of the training loop; see `envkit.trainer_bridge.run_folder.record.RunRecord`."""

    def step(self, step: int, values: Mapping[str, float]) -> None: ...
    def evaluation(self, step: int, values: Mapping[str, float]) -> None: ...
    def trajectories(self, step: int, episodes: Sequence[EpisodeRecord]) -> None: ...
    def schedule(self, step: int, row: Mapping[str, JSON]) -> None: ...
    def timeline(self, step: int, events: Sequence[Mapping[str, JSON]]) -> None: ...


@dataclass(frozen=True, slots=True)
class Imitation:
    """A phase of imitation before the first train step.

    Attributes:
        open: Opens the source of its samples.
        greedy: Plays validation tasks greedily, after a push, and returns the success rate; None for no checks.
        goal: Success rate at which the phase ends early.
    """

    open: Callable[[Display], Awaitable[Source]]
    trainer: PhasedTrainer
    greedy: Callable[[], Awaitable[float]] | None = None
    goal: float = 1.0


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """Length, sizes and intervals in train steps.

    Attributes:
        steps: Number of train steps in the whole run, including those before a resume.
        trajectories_every: Train steps between two trajectory files; 0 writes none.
        trajectories: Number of episodes per trajectory file.
    """

    steps: int
    evaluate_every: int
    checkpoint_every: int
    keep_checkpoints: int
    trajectories_every: int
    trajectories: int


class TrainLoop:
    """Runs the train steps of a run, starting after `state.step`.

    Args:
        decode: Converts tokens to text, for recorded episodes.
        state: Progress of the run; modified in place.
        elapsed_s: Returns how many seconds the run has taken so far, including the parts before a resume.
        stop: Shows the user what work must finish first when the run is being stopped.
        policy: Metadata to save with the policy in each checkpoint; None saves no metadata.
        on_step: Called after each train step with its number and its metrics.
        diagnostics: Names what is wrong with the run; None uses the default settings.
        probe: Probes the engine after each push, for the diagnostics; None makes no probes.
        names: Name of each environment, for metrics per environment; empty for no such metrics.
        imitation: The phase of imitation before the first train step; None without one, or after its end.
        source: Folder of the model from which the run started, if it has one.
    """

    def __init__(
        self,
        scheduler: Continuous,
        decode: Decode,
        trainer: Trainer,
        channel: WeightChannel,
        evaluator: Evaluator,
        record: Record,
        checkpoints: Path,
        settings: LoopSettings,
        state: RunState,
        elapsed_s: Callable[[], float],
        stop: Stop,
        policy: SavedPolicy | None = None,
        on_step: Callable[[int, Mapping[str, float]], None] | None = None,
        diagnostics: Diagnostics | None = None,
        probe: Probe | None = None,
        names: Sequence[str] = (),
        imitation: Imitation | None = None,
        source: Path | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._decode = decode
        self._trainer = trainer
        self._channel = channel
        self._evaluator = evaluator
        self._record = record
        self._checkpoints = checkpoints
        self._settings = settings
        self.state = state
        self._elapsed_s = elapsed_s
        self._stop = stop
        self._policy = policy
        self._on_step = on_step
        self._names = names
        self._imitation = imitation
        self._source = source
        exists = (checkpoints / f"step-{state.step}").exists()
        self._saved: tuple[int, int] | None = (state.step, state.imitated) if exists else None
        self._learning = False
        self._shown: dict[str, float | str] = {}
        self._latest: Mapping[str, float] = {}
        self._diagnostics = diagnostics or Diagnostics()
        self._probe = probe
        self._probe_s = 0.0
        self._waits: deque[float] = deque(maxlen=20)
        self._tasks: TaskGroup
        self._evaluated: anyio.Event | None = None
        self._evaluation_s = 0.0

    async def run(self, display: Display) -> None:
        """Imitate, and train until the last step. After a cancellation, call `save` for a checkpoint of what is done.

        Raises:
            EnvkitError: All episodes of a train step are void, or the diagnostics have a finding that stops the run.
        """
        if self._imitation is not None:
            await self._imitate(self._imitation, display)
        try:
            async with clock.background_tasks() as tasks:
                self._tasks = tasks
                await self._reinforce(display)
        except ExceptionGroup as errors:  # an error of the player, with its own cause
            first = next(leaves(errors))
            raise first from first.__cause__

    async def _reinforce(self, display: Display) -> None:
        settings, state = self._settings, self.state
        await self._report(self._diagnostics.begun(state.step), display)
        push = await self._channel.push()
        self._tasks.start_soon(self._scheduler.run)  # not before: the engine had other weights
        await self._report(await self._probed(push), display)
        shows_training = False
        await self._evaluate_and_save(display)
        while state.step < settings.steps:
            if not shows_training:
                display.phase("train", settings.steps)
                display.advance(state.step, **self._shown)
            push, found = await self._train_step(push, display)
            display.advance(1, **self._shown)
            if self._on_step is not None:
                self._on_step(state.step, self._latest)
            await self._report([*await self._probed(push), *found], display)
            shows_training = not await self._evaluate_and_save(display)

    async def _imitate(self, phase: Imitation, display: Display) -> None:
        """Imitate the samples of the phase's source, with an evaluation before. The next one is that of step 0."""
        state, began = self.state, clock.stopwatch()
        if "untrained" not in state.facts:
            await self.save()
            await self._channel.push()
            state.facts["untrained"] = {**await self._evaluator.run(display, 0)}
            self._saved = None
            await self.save()
        source = await phase.open(display)
        if not state.imitated:
            await phase.trainer.begin("imitation", source.updates)
        display.phase("imitate", source.updates)
        display.advance(state.imitated)
        greedy: float | None = None
        every, shown = min(_CHECK_EVERY, math.ceil(source.updates / 2)), dict[str, float | str]()
        while True:
            is_due = state.imitated > source.checks_from and state.imitated % every == 0
            if phase.greedy is not None and (is_due or state.imitated == source.updates):
                await self._channel.push()
                greedy = await phase.greedy()
                shown["greedy"] = f"{greedy:.3f}"
            if state.imitated == source.updates or (greedy is not None and greedy >= phase.goal):
                break
            if state.imitated % _SAVE_EVERY == 0:
                await self.save()
            with anyio.CancelScope(shield=True), self._stop.waits_for("an update of the imitation"):
                self._learning = True
                await self._trainer.accumulate(source.batch(state.imitated))
                report = await self._trainer.update()
                state.imitated += 1
                self._learning = False
            display.advance(1, **{"imitation loss": f"{report.get('policy_loss', math.nan):.3f}", **shown})
            await anyio.lowlevel.checkpoint()  # Ctrl-C works here: an update is shielded
        with anyio.CancelScope(shield=True):  # no checkpoint of half a phase
            self._learning = True
            await phase.trainer.begin("reinforcement", self._settings.steps)
            state.facts["imitation"] = {
                **source.facts,
                "updates": state.imitated,
                "greedy_validation": greedy,
                "wall_s": round(clock.stopwatch() - began, 1),
            }
            self._learning, self._saved = False, None

    async def save(self) -> None:
        """Write a checkpoint of the last finished train step or update of imitation.

        Do nothing if this checkpoint exists, or if an error interrupted an update, so that the weights may be newer.
        """
        done = (self.state.step, self.state.imitated)
        if self._saved != done and not self._learning:
            saving = f"the checkpoint of train step {self.state.step}"
            with anyio.CancelScope(shield=True), self._stop.waits_for(saving):
                self.state.wall_s = self._elapsed_s()
                await checkpoint.save(
                    self._checkpoints,
                    self._trainer,
                    self.state,
                    keep=self._settings.keep_checkpoints,
                    policy=self._policy,
                    source=self._source,
                )
                self._saved = done

    async def _evaluate_and_save(self, display: Display) -> bool:
        """Evaluate if that is due at this step, save if that is due, and return whether the display shows that."""
        settings, state, began = self._settings, self.state, clock.now()
        at_end = state.step in (0, settings.steps)
        evaluates = (at_end or state.step % settings.evaluate_every == 0) and state.facts.get("evaluated") != state.step
        saves, is_beside = at_end or state.step % settings.checkpoint_every == 0, False
        # A checkpoint has the results of all evaluations before it, so that a resumed run has them.
        if self._evaluated is not None and (evaluates or saves):
            await self._evaluated.wait()
        if evaluates:
            if self._scheduler.pace.ahead and not at_end:
                is_beside = await self._tasks.start(self._evaluate_beside, state.step)
            if not is_beside:
                with self._scheduler.paused():
                    self._enter_evaluation(state.step, await self._evaluator.run(display, state.step))
        self._evaluation_s += clock.now() - began
        if saves or is_beside or (evaluates and state.best_step == state.step):
            await self.save()
        return evaluates and not is_beside

    async def _evaluate_beside(self, step: int, *, task_status: TaskStatus[bool]) -> None:
        """Evaluate while training goes on, if the engine can keep the weights of train step `step`."""
        async with self._channel.frozen() as engine:
            if engine is not None:
                self._evaluated = anyio.Event()
            task_status.started(engine is not None)
            if engine is not None:
                self._enter_evaluation(step, await self._evaluator.run(SilentDisplay(), step, engine))
        if self._evaluated is not None:
            self._evaluated.set()

    async def _train_step(self, push: Push, display: Display) -> tuple[Push, list[Finding]]:
        """Play, update, push and record; return the push and what is wrong. `push` is that of the weights that play."""
        state, number, scheduler = self.state, self.state.step + 1, self._scheduler
        began = clock.now()
        async with clock.background_tasks() as tasks:
            tasks.start_soon(self._watch, display)
            batch = await scheduler.batch()
        self._waits.append(rollout_s := clock.now() - began)
        if batch.filtered and len(batch.groups) < batch.wanted:
            display.announce(
                f"train step {number} has {len(batch.groups)} of {batch.wanted} groups: {len(batch.filtered)} were "
                "rejected, which is rollout.max_filtered times as many"
            )
        samples = with_stale_ignored(samples_of(batch.groups), batch.version, scheduler.pace.max_lag)
        if not samples:
            raise EnvkitError(f"train step {number}: {why_no_samples(batch.trajectories)}")
        if self._probe is not None and not state.probe_prompt:
            state.probe_prompt = next(one.turns[0].new_ids.tolist() for one in batch.trajectories if one.turns)
            await self._report(await self._probed(push), display)
        # Forbid a cancellation between updating the weights and recording the step: the record must match the weights.
        with anyio.CancelScope(shield=True), self._stop.waits_for(f"the update of train step {number}"):
            self._learning = True
            times = [clock.now()]
            await self._trainer.accumulate(samples)
            report = await self._trainer.update()
            times.append(clock.now())
            push = await self._channel.push()
            times.append(clock.now())
            state.step = number
            state.episodes += len(valid(batch.trajectories)) + len(batch.void)
            state.lost_episodes += len(batch.void)
            schedule = scheduler.schedule
            accounting = scheduler.published(number, trained_sessions(samples, batch.trajectories))
            before, state.accounting = state.accounting, scheduler.ledger.counts()
            state.schedule = scheduler.state()
            updates = report.get("updates", 1.0) + report.get("skipped_updates", 0.0)
            seconds = {"rollout_s": rollout_s, "update_s": times[2] - times[0], "push_s": push.exposed_s}
            values = {
                **step_metrics(batch.played, report, seconds),
                **schedule_metrics(batch, samples, before, state.accounting, updates=updates),
                **waiting_metrics(batch, times[2] - began),
                **quantile_metrics(durations(batch.attempts)),
                "train_s": times[1] - times[0],
                "probe_s": self._probe_s,
                "evaluation_s": self._evaluation_s,
                **self._by_environment(batch),
            }
            self._record.schedule(number, schedule)
            self._record.step(number, {**values, "lost_total": float(state.lost_episodes)})
            self._learning, self._evaluation_s = False, 0.0
            self._record_episodes(number, batch, [Span("update", *times[:2]), Span("push", *times[1:])])
        self._show(values)
        self._latest = values
        void_after, played_after = last_actions(batch.void), last_actions(valid(batch.trajectories))
        event = TrainStep(number, values, len(samples), accounting, void_after, played_after)
        return push, self._diagnostics.stepped(event)

    async def _watch(self, display: Display) -> None:
        """Say what the trainer waits for, if it waits for much longer than usual."""
        await anyio.sleep(max(_STALL_S, _STALL_FACTOR * median(self._waits or [0.0])))
        began = clock.now()
        while True:
            display.announce(f"train step {self.state.step + 1} waits for episodes: {self._scheduler.waits_for()}")
            await anyio.sleep(max(_STALL_S, clock.now() - began))

    def _record_episodes(self, number: int, batch: Batch, work: Sequence[Span]) -> None:
        """Record some episodes and a timeline, if they are due. `work` is that of the trainer."""
        settings = self._settings
        every, decode = settings.trajectories_every, self._decode
        if every and (number in (1, settings.steps) or number % every == 0):
            chosen = sample_episodes(batch.groups, settings.trajectories, decode=decode, train_step=number)
            self._record.trajectories(number, chosen)
            self._record.timeline(number, timeline(number, batch.attempts, work))

    async def _probed(self, push: Push) -> list[Finding]:
        """Probe the engine after a push, once the prompt for it is known, and return what is wrong."""
        if self._probe is None or not self.state.probe_prompt:
            return []
        began = clock.now()
        probes = await self._probe.measure(self.state.probe_prompt, push)
        self._probe_s = clock.now() - began
        return [finding for probe in probes for finding in self._diagnostics.pushed(probe)]

    async def _report(self, found: Sequence[Finding], display: Display) -> None:
        """Show findings. If one of them stops the run, save a checkpoint and raise an error."""
        self.state.facts["findings"] = {**self._diagnostics.found}
        for one in found:
            line = f"train step {self.state.step}: {one.name}: {one.line}"
            if one.name in self._diagnostics.stop_on:
                await self.save()
                raise EnvkitError(
                    f"{line}; then continue from the checkpoint of train step {self.state.step} with --resume, or "
                    f"remove {one.name} from diagnostics.stop_on to train all the same"
                )
            display.announce(line)

    def _by_environment(self, batch: Batch) -> dict[str, float]:
        """Return the metrics of each environment in a train step, such as ``success/FrozenLake-v0``."""
        if not self._names:
            return {}
        return {
            f"{key}/{name}": value
            for name, part in batch.played.by_name(lambda index: self._names[batch.envs[index]]).items()
            for key, value in step_metrics(part, {}, {}).items()
            if key not in ("policy_version", "tokens_per_s")
        }

    def _enter_evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Record the evaluation of train step `step`, whose checkpoint may be the best."""
        state, found = self.state, dict[str, JSON](values)
        if values:
            self._record.evaluation(step, values)
            self._shown["held-out"] = (
                f"{values['eval_success']:.3f}" if _is_known(found) else f"return {values['eval_return']:.2f}"
            )
        state.facts.setdefault("before", found)
        state.facts |= {"after": found, "evaluated": step}
        success = values.get("eval_success" if _is_known(found) else "eval_return")
        if success is not None and (state.best_success is None or success >= state.best_success):
            state.best_step, state.best_success = step, success
        self._saved = None  # Save the checkpoint again if it was saved before the evaluation.

    def _show(self, values: Mapping[str, float]) -> None:
        if not math.isnan(values["success"]):
            self._shown["success"] = f"{values['success']:.3f}"
        self._shown |= {
            "return": f"{values['return']:.2f}",
            "tokens/s": f"{values['tokens_per_s']:.0f}",
            "lost": f"{self.state.lost_episodes}",
        }
        if self._scheduler.pace.ahead and "lag_mean" in values:
            self._shown["lag"] = f"{values['lag_mean']:.1f}"
        if "entropy_nats" in values:
            self._shown["entropy"] = f"{values['entropy_nats']:.2f}"
        if values["cut_completions"] > 0:
            self._shown["cut off"] = f"{values['cut_completions']:.1%}"


def _is_known(evaluated: Mapping[str, JSON]) -> bool:
    success = evaluated.get("eval_success")
    return isinstance(success, float) and not math.isnan(success)
