"""Training runs with parts that can be made faulty: a real tiny policy, or scripted parts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from envkit import clock
from envkit.protocols import EnvHost, Episode, PolicyEngine, Renderer, Trainer
from envkit.runs.display import SilentDisplay
from envkit.trainer_bridge.diagnostics import Diagnostics, Probe
from envkit.trainer_bridge.engines.transformers import TransformersEngine
from envkit.trainer_bridge.evaluation.evaluator import Evaluator
from envkit.trainer_bridge.loop import LoopSettings, TrainLoop
from envkit.trainer_bridge.render.plain import PlainRenderer
from envkit.trainer_bridge.rollout import PolicyPlayer, RolloutLimits
from envkit.trainer_bridge.run_folder import checkpoint
from envkit.trainer_bridge.run_folder.checkpoint import RunState
from envkit.trainer_bridge.scheduler import Rollout
from envkit.trainer_bridge.scheduler.continuous import Continuous
from envkit.trainer_bridge.scheduler.pace import Pace
from envkit.trainer_bridge.stopping import Stop
from envkit.trainer_bridge.trainers.torch_local import TorchTrainer, TrainerSettings
from envkit.trainer_bridge.weights.channel import WeightChannel
from envkit.types import Info, Observation, PauseMode, Reset, Step, Task, stable_hash
from tests.trainer_bridge.loop_parts import Notes
from tests.trainer_bridge.models import open_model
from tests.trainer_bridge.trainees import algorithm_of

SETTINGS = LoopSettings(
    steps=3,
    evaluate_every=100,
    checkpoint_every=100,
    keep_checkpoints=9,
    trajectories_every=0,
    trajectories=3,
)
FOLDS: Info = {"metrics": {"success": "last", "action_is_valid": "mean"}}


@dataclass
class WordEpisode(Episode):
    """Two turns; a hash of the action decides on its reward."""

    task: Task
    turn: int = 0

    async def reset(self) -> Reset:
        return Reset(Observation(f"you see {'P#TB_'[self.task.seed % 5]}"), FOLDS)

    async def step(self, action: str) -> Step:
        self.turn += 1
        reward = float(stable_hash(action, self.task.seed) % 2)
        info: Info = {"success": reward > 0, "action_is_valid": bool(action)}
        return Step(Observation("a wall"), reward, self.turn == 2, False, info)


class WordHost(EnvHost):
    """Leases word episodes."""

    capacity = 100

    @asynccontextmanager
    async def lease(self, task: Task) -> AsyncIterator[WordEpisode]:
        yield WordEpisode(task)


class RecordingDisplay(SilentDisplay):
    """Keeps the announced lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def announce(self, line: str) -> None:
        self.lines.append(line)


class Run:
    """A training run, from the newest checkpoint in `folder` if there is one."""

    def __init__(
        self,
        folder: Path,
        engine: PolicyEngine,
        trainer: Trainer,
        renderer: Renderer,
        host: EnvHost,
        *,
        settings: LoopSettings = SETTINGS,
        scheduler: type[Continuous] = Continuous,
        rows: list[Mapping[str, Any]] | None = None,
        ahead: int = 0,
        **diagnostics: Any,
    ) -> None:
        self.display = RecordingDisplay()
        self.notes = Notes()
        state = RunState()
        if list(folder.glob("step-*")):
            newest = checkpoint.latest(folder)
            state = checkpoint.load_state(newest)
            asyncio.run(trainer.restore(str(newest)))
        limits = RolloutLimits(max_turns=3, max_tokens=60, turn_tokens=1, step_timeout_s=10, retries=1)
        player = PolicyPlayer(engine, renderer, limits)
        pace = Pace(steps=settings.steps, groups_per_step=4, group_size=4, seed=7, ahead=ahead, max_lag=ahead)
        known: Any = state.facts.get("findings", {})
        self.diagnostics = Diagnostics(rows or [], dict(known), **{"stop_on": (), **diagnostics})
        self.loop = TrainLoop(
            scheduler=scheduler(
                host,
                player,
                limits,
                100,
                pace,
                lambda env, number: Task("Words-v0", number),
                version=state.step,
                state=state.schedule,
                counts=state.accounting,
            ),
            decode=renderer.text,
            trainer=trainer,
            channel=WeightChannel(trainer, engine, mode=PauseMode.KEEP if ahead else PauseMode.WAIT),
            evaluator=Evaluator(Rollout(host, player, limits, 100), [], temperature=1.0, seed=99),
            record=self.notes,
            checkpoints=folder,
            settings=settings,
            state=state,
            elapsed_s=lambda: 0.0,
            stop=Stop(),
            diagnostics=self.diagnostics,
            probe=Probe(engine, trainer, temperature=1.0, max_tokens=60),
        )

    def run(self) -> Run:
        async def main() -> None:
            try:
                await self.loop.run(self.display)
            finally:
                await self.loop.save()

        clock.run(main, virtual=True)
        return self

    @property
    def found(self) -> dict[str, Any]:
        """The train step after which each finding was first seen."""
        return {name: entry["first_step"] for name, entry in self.diagnostics.found.items() if isinstance(entry, dict)}


class WordRenderer(PlainRenderer):
    """The renderer of tiny policies, with the tokenizer in `folder`."""

    def __init__(self, folder: Path) -> None:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        super().__init__(tokenizer)


def tiny_run(
    folder: Path,
    policy: Path,
    *,
    engine: type[TransformersEngine] = TransformersEngine,
    learning_rate: float = 3e-3,
    **how: Any,
) -> Run:
    """A run of the tiny policy in the folder `policy`."""
    model = open_model(policy)
    trainer_settings = TrainerSettings(
        learning_rate=learning_rate, critic_learning_rate=1e-3, max_grad_norm=1.0, micro_tokens=4096, seed=7, threads=1
    )
    trainer = TorchTrainer(model, algorithm_of(), trainer_settings, None)
    playing = engine(deepcopy(model), pad_id=0, threads=1)
    playing.copy_from(trainer.copy_to)
    return Run(folder, playing, trainer, WordRenderer(policy), WordHost(), **how)
