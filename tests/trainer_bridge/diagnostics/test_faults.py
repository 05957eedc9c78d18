"""Faults made on purpose: each is named within a train step, under its own name and no other."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from envkit.errors import EnvkitError
from envkit.trainer_bridge.engines.transformers import TransformersEngine
from envkit.trainer_bridge.run_folder import checkpoint
from envkit.trainer_bridge.scheduler.continuous import Continuous
from envkit.trainer_bridge.scheduler.pace import Batch
from envkit.types import Group, Sample, Weights
from tests.trainer_bridge.diagnostics.runs import SETTINGS, Run, WordHost, tiny_run
from tests.trainer_bridge.fakes import LetterRenderer, ScriptedEngine, ScriptedTrainer

# --- Runs without a fault --------------------------------------------------------------------------------------------


def test_a_run_at_a_lag_has_no_finding_and_its_gap_is_that_of_current_tokens(tiny_folder: Path, tmp_path: Path) -> None:
    # The learning rate is high, so that old tokens look as if another policy had sampled them.
    settings = replace(SETTINGS, steps=8)
    run = tiny_run(tmp_path, tiny_folder, settings=settings, ahead=2, learning_rate=0.02).run()
    assert (run.display.lines, run.diagnostics.summary()) == ([], [])
    rows = [*run.notes.steps.values()]
    assert max(row["lag_max"] for row in rows) == 2
    assert any(row["approx_kl"] > 1e-3 for row in rows if row["lag_mean"])
    for row in rows:
        assert row.get("sampler_gap_nats", 0.0) < 1e-4
        assert "sampler_gap_nats" not in row or "lag_share_0" in row
    assert any("sampler_gap_nats" not in row for row in rows)


# --- Weights ---------------------------------------------------------------------------------------------------------


class Stuck(TransformersEngine):
    """Its weights stay as they are from version `STUCK` on."""

    STUCK = 0

    async def load(self, weights: Weights) -> None:
        if weights.version < self.STUCK:
            await super().load(weights)


class StuckLater(Stuck):
    STUCK = 2


class Garbled(TransformersEngine):
    """One tensor is wrong after each load."""

    async def load(self, weights: Weights) -> None:
        await super().load(weights)
        weight = next(one for name, one in self._model.named_parameters() if "down_proj" in name)
        with torch.no_grad():
            weight.mul_(1.5)


def test_an_engine_that_keeps_its_weights_stops_the_run_with_a_checkpoint(tiny_folder: Path, tmp_path: Path) -> None:
    run = tiny_run(tmp_path, tiny_folder, engine=Stuck, stop_on=frozenset({"weights_not_applied"}))
    with pytest.raises(EnvkitError, match=r"^train step 1: weights_not_applied: the engine does not run the") as raised:
        run.run()
    assert "continue from the checkpoint of train step 1 with --resume" in str(raised.value)
    assert list(run.notes.steps) == [1]
    assert checkpoint.load_state(tmp_path / "step-1").facts["findings"] == run.diagnostics.found
    again = tiny_run(tmp_path, tiny_folder, engine=TransformersEngine, rows=[{"step": 1}]).run()
    assert list(again.notes.steps) == [2, 3]
    assert again.found == {"weights_not_applied": 1}


@pytest.mark.parametrize(
    ("engine", "name", "step"),
    [(StuckLater, "weights_not_applied", 2), (Garbled, "engine_disagrees", 0)],
)
def test_wrong_weights_are_named_once_after_the_push(
    engine: type[TransformersEngine], name: str, step: int, tiny_folder: Path, tmp_path: Path
) -> None:
    run = tiny_run(tmp_path, tiny_folder, engine=engine).run()
    assert run.found == {name: step}
    assert [line.split(": ")[:2] for line in run.display.lines] == [[f"train step {step}", name]]
    (finding,) = run.diagnostics.summary()
    assert isinstance(finding, dict)
    assert (finding["name"], finding["first_step"], finding["last_step"]) == (name, step, 3)


def test_a_fault_is_found_at_a_lag_too(tiny_folder: Path, tmp_path: Path) -> None:
    run = tiny_run(tmp_path, tiny_folder, settings=replace(SETTINGS, steps=4), ahead=1, engine=Stuck).run()
    assert list(run.found) == ["weights_not_applied"]


# --- Samples ---------------------------------------------------------------------------------------------------------


def scripted(folder: Path, trainer: ScriptedTrainer | None = None, **how: Any) -> Run:
    return Run(folder, ScriptedEngine(), trainer or ScriptedTrainer(), LetterRenderer(), WordHost(), **how)


class Late(Continuous):
    """The tokens of the second batch are too old, when it is taken."""

    async def batch(self) -> Batch:
        found = await super().batch()
        return replace(found, version=found.version + 9) if self.version == 1 else found


def test_a_batch_whose_tokens_are_all_masked_changes_nothing_and_training_goes_on(
    tiny_folder: Path, tmp_path: Path
) -> None:
    run = tiny_run(tmp_path, tiny_folder, scheduler=Late).run()
    assert (run.found, list(run.notes.steps)) == ({}, [1, 2, 3])
    first, masked, last = run.notes.steps.values()
    assert (masked["updates"], masked["learned_tokens"], masked["grad_norm"]) == (0, 0, 0)
    assert not {"lag_mean", "lag_share_0", "sampler_gap_nats"} & {*masked}
    assert all(math.isfinite(value) for value in masked.values())
    assert first["updates"] > 0
    assert last["updates"] > 0


class Dropping(Continuous):
    """The second train step's first group lacks two of its episodes."""

    async def batch(self) -> Batch:
        found = await super().batch()
        if self.version != 1:
            return found
        first, *others = found.groups
        return replace(found, groups=(Group(first.task, first.trajectories[:2]), *others))


class Repeating(Continuous):
    """The second train step's first episode is in its group twice."""

    async def batch(self) -> Batch:
        found = await super().batch()
        if self.version != 1:
            return found
        first, *others = found.groups
        return replace(found, groups=(Group(first.task, (*first.trajectories, first.trajectories[0])), *others))


class Forgetful(ScriptedTrainer):
    """Loses a sample in the second train step, and trains on it in the third."""

    async def accumulate(self, samples: Sequence[Sample]) -> None:
        if self.version == 1:
            *samples, self.late = samples
        await super().accumulate([*samples, self.late] if self.version == 2 else samples)

    async def update(self) -> Mapping[str, float]:
        count = len(self._samples)
        return {**await super().update(), "samples": float(count)}


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (
            {"scheduler": Dropping},
            "2 attempts are entered as finished, and the scheduler has 0 (train/00000004/0002.0, ",
        ),
        ({"scheduler": Repeating}, "episode train/00000004/0000.0 ended as trained, but is not open"),
        ({"trainer": Forgetful()}, "the trainer got 16 samples, but trained on 15;"),
    ],
)
def test_episodes_that_are_dropped_or_trained_on_twice_are_named(
    how: dict[str, Any], words: str, tmp_path: Path
) -> None:
    run = scripted(tmp_path, **how).run()
    assert run.found == {"samples_lost_or_repeated": 2}
    (line,) = run.display.lines
    assert line.startswith(f"train step 2: samples_lost_or_repeated: {words}")
    assert len(run.notes.steps) == 3


@pytest.mark.parametrize(("steps", "problem"), [([1, 2], {}), ([1], {"samples_lost_or_repeated": 2})])
def test_a_resumed_run_whose_metrics_lack_a_train_step_is_named_at_once(
    steps: list[int], problem: dict[str, int], tmp_path: Path
) -> None:
    scripted(tmp_path, settings=replace(SETTINGS, steps=2)).run()
    resumed = scripted(tmp_path, rows=[{"step": step} for step in steps]).run()
    assert list(resumed.notes.steps) == [3]
    assert resumed.found == problem
