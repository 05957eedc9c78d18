"""A training run on virtual time: the real loop and scheduler with a host, an engine and a trainer that only wait."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import anyio

from envkit import clock
from envkit.protocols import EnvHost, Episode
from envkit.runs.display import SilentDisplay
from envkit.trainer_bridge.evaluation.evaluator import Evaluator
from envkit.trainer_bridge.loop import LoopSettings, TrainLoop
from envkit.trainer_bridge.rollout import PolicyPlayer, RolloutLimits
from envkit.trainer_bridge.run_folder.checkpoint import RunState
from envkit.trainer_bridge.scheduler import Rollout
from envkit.trainer_bridge.scheduler.continuous import Continuous, Pace
from envkit.trainer_bridge.stopping import Stop
from envkit.trainer_bridge.weights.channel import WeightChannel
from envkit.types import Observation, PauseMode, Reset, Sample, Step, Task, stable_hash
from tests.trainer_bridge.fakes import LetterRenderer, ScriptedEngine, ScriptedTrainer
from tests.trainer_bridge.loop_parts import Notes

SETTINGS = LoopSettings(
    steps=8,
    evaluate_every=100,
    checkpoint_every=100,
    keep_checkpoints=1,
    trajectories_every=0,
    trajectories=0,
)


@dataclass
class SlowEpisode(Episode):
    """Each step takes as long as `latency` says; the last one ends the episode."""

    latency: Callable[[random.Random], float]
    rng: random.Random
    turns: int

    async def reset(self) -> Reset:
        return Reset(Observation("s"), {"metrics": {"success": "last"}})

    async def step(self, action: str) -> Step:
        await anyio.sleep(self.latency(self.rng))
        self.turns -= 1
        return Step(Observation("t"), float(self.rng.random() < 0.5), self.turns == 0, False, {})


class SlowHost(EnvHost):
    """Leases slow episodes, each with random numbers of its own; at most `capacity` at once."""

    def __init__(self, latency: Callable[[random.Random], float], *, seed: int, turns: int = 1, capacity: int = 256) -> None:
        self._latency, self._seed, self._turns = latency, seed, turns
        self._leases = 0
        self.lent = 0
        self.capacity = capacity

    @asynccontextmanager
    async def lease(self, task: Task) -> AsyncIterator[SlowEpisode]:
        self._leases += 1
        self.lent += 1
        try:
            yield SlowEpisode(self._latency, random.Random(stable_hash(self._seed, self._leases)), self._turns)
        finally:
            self.lent -= 1


class SlowTrainer(ScriptedTrainer):
    """Takes `seconds` for an update."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    async def update(self) -> Mapping[str, float]:
        await anyio.sleep(self._seconds)
        return await super().update()


@dataclass
class Outcome:
    """What a simulated run measured.

    Attributes:
        step_s: Seconds of virtual time a train step.
        tokens_per_s: Tokens that were learned from, per second of virtual time.
        masked: Share of the tokens in batches that were masked.
        rows: The metrics of each train step.
        taught: The samples of each update.
    """

    step_s: float
    tokens_per_s: float
    masked: float
    rows: dict[int, dict[str, float]] = field(default_factory=dict)
    taught: list[tuple[int, list[Sample]]] = field(default_factory=list)


def simulate(folder: Path, host: SlowHost, pace: Pace, *, train_s: float = 30.0, tokens: int = 100) -> Outcome:
    """Run `pace.steps` train steps on virtual time."""
    engine, trainer, notes = ScriptedEngine(lambda call: "x" * tokens), SlowTrainer(train_s), Notes()
    engine.repeats = False
    limits = RolloutLimits(max_turns=100, max_tokens=100_000, turn_tokens=tokens)
    player = PolicyPlayer(engine, LetterRenderer(), limits)
    scheduler = Continuous(host, player, limits, host.capacity, pace, lambda env, number: Task("Slow-v0", number))
    loop = TrainLoop(
        scheduler=scheduler,
        decode=LetterRenderer().text,
        trainer=trainer,
        channel=WeightChannel(trainer, engine, mode=PauseMode.KEEP),
        evaluator=Evaluator(Rollout(host, player, limits, 1), [], temperature=1.0, seed=0),
        record=notes,
        checkpoints=folder,
        settings=SETTINGS,
        state=RunState(),
        elapsed_s=lambda: 0.0,
        stop=Stop(),
    )

    async def main() -> float:
        await loop.run(SilentDisplay())
        return clock.now()

    seconds = clock.run(main, virtual=True)
    assert host.lent == 0
    learned = loop.state.accounting["tokens_trained"]
    masked = loop.state.accounting["tokens_masked"]
    return Outcome(seconds / pace.steps, learned / seconds, masked / (learned + masked), notes.steps, trainer.taught)


def heavy_tailed(rng: random.Random) -> float:
    """Median 10 s, mean 20 s, at most 300 s."""
    return min(rng.lognormvariate(2.302585, 1.2), 300.0)
