"""A training run on virtual time: the real loop and scheduler with a host, an engine and a trainer that only wait."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio

from envkit import clock
from envkit.errors import SandboxLostError
from envkit.protocols import EnvHost, Episode
from envkit.runs.display import SilentDisplay
from envkit.trainer_bridge.diagnostics import Diagnostics
from envkit.trainer_bridge.evaluation.evaluator import Evaluator
from envkit.trainer_bridge.loop import LoopSettings, TrainLoop
from envkit.trainer_bridge.rollout import PolicyPlayer, RolloutLimits
from envkit.trainer_bridge.run_folder import checkpoint
from envkit.trainer_bridge.run_folder.checkpoint import RunState
from envkit.trainer_bridge.scheduler import Rollout
from envkit.trainer_bridge.scheduler.continuous import Continuous
from envkit.trainer_bridge.scheduler.cursor import Schedule
from envkit.trainer_bridge.scheduler.pace import Batch, Pace
from envkit.trainer_bridge.stopping import Stop
from envkit.trainer_bridge.weights.channel import WeightChannel
from envkit.types import Observation, PauseMode, Reset, Step, Task, Trajectory, Weights, stable_hash
from tests.causes import cause
from tests.trainer_bridge.fakes import LetterRenderer, ScriptedEngine, ScriptedTrainer
from tests.trainer_bridge.loop_parts import Notes

Latency = Callable[[random.Random], float]
"""Seconds of a step. A negative number loses the sandbox."""


@dataclass
class SlowEpisode(Episode):
    """Each step takes as long as `latency` says; the last one ends the episode."""

    latency: Latency
    rng: random.Random
    turns: int

    async def reset(self) -> Reset:
        return Reset(Observation("s"), {"metrics": {"success": "last"}})

    async def step(self, action: str) -> Step:
        if (seconds := self.latency(self.rng)) < 0:
            raise SandboxLostError("sb", cause("gone"))
        await anyio.sleep(seconds)
        self.turns -= 1
        won = self.rng.random() < 0.5
        return Step(Observation("t"), float(won), self.turns == 0, False, {"success": won, "seconds": seconds})


class SlowHost(EnvHost):
    """Leases slow episodes, each with random numbers of its own; at most `capacity` at once.

    An episode has from `least_turns` to `turns` turns.
    """

    capacity: int = 256

    def __init__(
        self, latency: Latency, *, seed: int, turns: int = 1, least_turns: int = 1, capacity: int = 256
    ) -> None:
        self._latency, self._seed, self._turns = latency, seed, (least_turns, turns)
        self._leases = 0
        self.lent = 0
        self.capacity = capacity

    @asynccontextmanager
    async def lease(self, task: Task) -> AsyncIterator[SlowEpisode]:
        self._leases += 1
        self.lent += 1
        assert self.lent <= self.capacity, "more episodes than places"
        try:
            rng = random.Random(stable_hash(self._seed, self._leases))
            yield SlowEpisode(self._latency, rng, rng.randint(*self._turns))
        finally:
            self.lent -= 1


class SlowTrainer(ScriptedTrainer):
    """Takes `seconds` for an update, and `publish_s` to publish its weights."""

    def __init__(self, seconds: float, publish_s: float) -> None:
        super().__init__()
        self._seconds, self._publish_s = seconds, publish_s

    async def update(self) -> Mapping[str, float]:
        await anyio.sleep(self._seconds)
        return await super().update()

    async def publish(self) -> Weights:
        await anyio.sleep(self._publish_s)
        return await super().publish()


class Watched(Continuous):
    """A scheduler that keeps its batches, and the time at which the weights of each were published."""

    def __init__(self, *args: Any, **how: Any) -> None:
        super().__init__(*args, **how)
        self.batches: list[Batch] = []
        self.published_s: list[float] = []

    async def batch(self) -> Batch:
        self.batches.append(await super().batch())
        return self.batches[-1]

    def published(self, version: int, trained: Sequence[str]) -> str:
        self.published_s.append(clock.now())
        return super().published(version, trained)


class Simulation:
    """A run, from the newest checkpoint in `folder` if there is one.

    Args:
        folder: Of the checkpoints.
        host: Plays the episodes.
        pace: Of the scheduler.
        steps: Train steps of the loop; those of `pace` if None. With fewer, it ends while episodes are in progress.
        train_s: Seconds of an update.
        publish_s: Seconds until its weights are published.
        tokens: Tokens of a completion.
        weights: Weight of each environment.
        repeats: Whether the engine repeats its completions, so that at `ahead` 0 episodes play in lockstep.
        cut_s: Seconds of virtual time after which the run is killed: nothing more is saved.
        replay: The schedule of another run.
        limits: Of an episode.
    """

    def __init__(
        self,
        folder: Path,
        host: SlowHost,
        pace: Pace,
        *,
        steps: int | None = None,
        train_s: float = 30.0,
        publish_s: float = 0.0,
        tokens: int = 100,
        weights: Sequence[float] = (1.0,),
        repeats: bool = False,
        cut_s: float = math.inf,
        replay: Schedule | None = None,
        **limits: Any,
    ) -> None:
        self.host, self.cut_s, self.notes = host, cut_s, Notes()
        engine = self.engine = ScriptedEngine(lambda call: "x" * tokens)
        engine.repeats = repeats
        self.trainer = SlowTrainer(train_s, publish_s)
        state = RunState()
        if list(folder.glob("step-*")):
            newest = checkpoint.latest(folder)
            state = checkpoint.load_state(newest)
            asyncio.run(self.trainer.restore(str(newest)))
        within = RolloutLimits(**{"max_turns": 100, "max_tokens": 100_000, "turn_tokens": tokens, **limits})
        player = PolicyPlayer(engine, LetterRenderer(), within)
        self.scheduler = Watched(
            host,
            player,
            within,
            host.capacity,
            pace,
            lambda env, number: Task(f"Slow{env}-v0", number),
            weights=weights,
            version=state.step,
            state=state.schedule,
            counts=state.accounting,
            replay=replay,
        )
        self.diagnostics = Diagnostics(stop_on=(), rows=[{"step": number + 1} for number in range(state.step)])
        self.loop = TrainLoop(
            scheduler=self.scheduler,
            decode=LetterRenderer().text,
            trainer=self.trainer,
            channel=WeightChannel(self.trainer, engine, mode=PauseMode.KEEP),
            evaluator=Evaluator(Rollout(host, player, within, 1), [], temperature=1.0, seed=0),
            record=self.notes,
            checkpoints=folder,
            settings=LoopSettings(
                steps=pace.steps if steps is None else steps,
                evaluate_every=1000,
                checkpoint_every=2,
                keep_checkpoints=1,
                trajectories_every=0,
                trajectories=0,
            ),
            state=state,
            elapsed_s=lambda: 0.0,
            stop=Stop(),
            diagnostics=self.diagnostics,
            names=[f"Slow{env}-v0" for env in range(len(weights))] if len(weights) > 1 else [],
        )

    def run(self) -> Simulation:
        """Run to the end, or until it is killed; every place is free afterwards."""

        async def main() -> None:
            with anyio.move_on_after(self.cut_s):
                await self.loop.run(SilentDisplay())
            self.seconds = clock.now()

        clock.run(main, virtual=True)
        assert self.host.lent == 0
        assert "samples_lost_or_repeated" not in self.diagnostics.found, self.diagnostics.found
        return self

    @property
    def rows(self) -> list[dict[str, float]]:
        """The metrics of each train step."""
        return [*self.notes.steps.values()]

    def total(self, name: str) -> float:
        """The sum of a metric over the train steps."""
        return sum(row[name] for row in self.rows)


def heavy_tailed(rng: random.Random) -> float:
    """Median 10 s, mean 20 s, at most 300 s."""
    return min(rng.lognormvariate(math.log(10), 1.2), 300.0)


def seconds_of(trajectory: Trajectory) -> float:
    """Return the seconds of the steps of an episode."""
    return sum(float(str(turn.step.info["seconds"])) for turn in trajectory.turns if turn.step is not None)
