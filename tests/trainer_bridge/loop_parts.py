"""One part of a scripted run: the real loop with a scripted trainer, engine and host."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import anyio

from envkit import clock
from envkit.runs.display import Display, SilentDisplay
from envkit.trainer_bridge.diagnostics import Diagnostics
from envkit.trainer_bridge.evaluation.evaluator import Evaluator
from envkit.trainer_bridge.loop import Imitation, LoopSettings, TrainLoop
from envkit.trainer_bridge.rollout import PolicyPlayer, RolloutLimits
from envkit.trainer_bridge.run_folder import checkpoint
from envkit.trainer_bridge.run_folder.checkpoint import RunState
from envkit.trainer_bridge.scheduler import Rollout
from envkit.trainer_bridge.scheduler.continuous import Continuous
from envkit.trainer_bridge.scheduler.pace import Pace
from envkit.trainer_bridge.sources.source import Source
from envkit.trainer_bridge.stopping import Stop
from envkit.trainer_bridge.weights.channel import WeightChannel
from envkit.types import JSON, EpisodeRecord, Info, Task, TrainPhase, stable_hash
from tests.trainer_bridge.fakes import Answer, Call, LetterRenderer, ScriptedEngine, ScriptedHost, ScriptedTrainer

SETTINGS = LoopSettings(
    steps=6,
    evaluate_every=2,
    checkpoint_every=3,
    keep_checkpoints=2,
    trajectories_every=0,
    trajectories=3,
)
PACE = Pace(steps=SETTINGS.steps, groups_per_step=2, group_size=2, temperature=0.9, seed=7)
FOLDS: Info = {"metrics": {"success": "last"}}


@dataclass
class Notes:
    """The records of the loop, without values that depend on the machine."""

    steps: dict[int, dict[str, float]] = field(default_factory=dict)
    evaluations: dict[int, dict[str, float]] = field(default_factory=dict)
    shown: dict[int, list[EpisodeRecord]] = field(default_factory=dict)
    schedules: dict[int, Mapping[str, JSON]] = field(default_factory=dict)
    timelines: dict[int, list[Mapping[str, JSON]]] = field(default_factory=dict)
    evaluated_after: dict[int, int] = field(default_factory=dict)
    """The train step after which each evaluation was recorded."""
    on_step: Callable[[Mapping[str, float]], object] = lambda values: None

    def step(self, step: int, values: Mapping[str, float]) -> None:
        assert step not in self.steps
        self.on_step(values)
        self.steps[step] = {name: value for name, value in values.items() if not name.endswith(("_s", "_mib"))}

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        assert step not in self.evaluations
        self.evaluations[step] = dict(values)
        self.evaluated_after[step] = max(self.steps, default=0)

    def trajectories(self, step: int, episodes: Sequence[EpisodeRecord]) -> None:
        self.shown[step] = list(episodes)

    def schedule(self, step: int, row: Mapping[str, JSON]) -> None:
        self.schedules[step] = row

    def timeline(self, step: int, events: Sequence[Mapping[str, JSON]]) -> None:
        self.timelines[step] = list(events)


class PhasedScriptedTrainer(ScriptedTrainer):
    """Its weights are a hash of its phases, too."""

    def __init__(self) -> None:
        super().__init__()
        self.phases: list[tuple[TrainPhase, int]] = []

    async def begin(self, phase: TrainPhase, steps: int) -> None:
        self.version, self.weights = 0, stable_hash(self.weights, phase, steps) % 2**32
        self.phases.append((phase, steps))


class Part:
    """One part of a run, from the newest checkpoint if there is one.

    Args:
        folder: Of the checkpoints.
        settings: Of the loop.
        pace: Of the scheduler, whose number of train steps is that of the loop.
        eval_tasks: Number of tasks in each evaluation.
        names: The environments of a mixture.
        source: What the run imitates first.
        greedy: The success rate of a validation after a number of updates of imitation.
        goal: The success rate at which imitation ends.
        engine: Makes the engine from what it says.
    """

    def __init__(
        self,
        folder: Path,
        settings: LoopSettings = SETTINGS,
        *,
        pace: Pace = PACE,
        eval_tasks: int = 3,
        names: Sequence[str] = (),
        source: Source | None = None,
        greedy: Callable[[int], float] | None = None,
        goal: float = 1.0,
        engine: Callable[[Callable[[Call], str]], ScriptedEngine] = ScriptedEngine,
    ) -> None:
        self.trainer = PhasedScriptedTrainer()
        self.checked: list[int] = []
        self.cut_at: int | None = None
        self.scope: anyio.CancelScope
        self.engine = engine(self._say)
        self.host = ScriptedHost(self.script)
        self.notes = Notes()
        self.played: list[int] = []
        self.seconds = 0.0
        state = RunState()
        if list(folder.glob("step-*")):
            newest = checkpoint.latest(folder)
            state = checkpoint.load_state(newest)
            asyncio.run(self.trainer.restore(str(newest)))
        limits = RolloutLimits(max_turns=3, max_tokens=100, turn_tokens=2, step_timeout_s=10, retries=1)
        rollout = Rollout(self.host, PolicyPlayer(self.engine, LetterRenderer(), limits), limits, 100)
        self.loop = TrainLoop(
            scheduler=Continuous(
                self.host,
                rollout.player,
                limits,
                100,
                replace(pace, steps=settings.steps),
                lambda env, number: Task("Scripted-v0", number),
                weights=[1.0] * max(len(names), 1),
                version=state.step,
                state=state.schedule,
                counts=state.accounting,
            ),
            decode=LetterRenderer().text,
            trainer=self.trainer,
            channel=WeightChannel(self.trainer, self.engine),
            evaluator=Evaluator(
                rollout,
                [Task("Scripted-v0", 1000 + n) for n in range(eval_tasks)],
                temperature=0.9,
                seed=99,
                names=[names[n % len(names)] for n in range(eval_tasks)] if names else [],
            ),
            record=self.notes,
            checkpoints=folder,
            settings=settings,
            state=state,
            elapsed_s=lambda: self.seconds,
            stop=Stop(),
            names=names,
            diagnostics=Diagnostics(rows=[{"step": number + 1} for number in range(state.step)]),
            imitation=None if source is None or "imitation" in state.facts else self._imitation(source, greedy, goal),
        )

    def _imitation(self, source: Source, greedy: Callable[[int], float] | None, goal: float) -> Imitation:
        async def open_source(display: Display) -> Source:
            return source

        async def check() -> float:
            self.checked.append(self.engine.version)  # the newest weights are pushed before
            return (greedy or float)(self.loop.state.imitated)

        return Imitation(open_source, self.trainer, None if greedy is None else check, goal)

    def script(self, task: Task, time: int) -> Sequence[Answer]:
        """Two steps; the second one pays, and is a success, for even tasks."""
        self.played.append(task.seed)
        even = task.seed % 2 == 0
        won: Info = {"success": even}
        middle = Answer("t", info={"success": False})
        return [Answer("s", info=FOLDS), middle, Answer("", float(even), "terminated", info=won)]

    def _say(self, call: Call) -> str:
        if self.cut_at is not None and len(self.engine.calls) >= self.cut_at:
            self.scope.cancel()
        # The policy: what it says follows from its weights, the prompt and the seed.
        return "abcdefgh"[stable_hash(self.engine.version, list(call.prompt), call.params.seed) % 8]

    def run(self) -> Part:
        async def main() -> None:
            with anyio.CancelScope() as self.scope:
                await self.loop.run(SilentDisplay())
            await self.loop.save()

        clock.run(main, virtual=True)
        return self
