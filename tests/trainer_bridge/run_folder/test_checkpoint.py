"""Checkpoints: they appear complete, the newest few are kept, and a full disk destroys none of them."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import anyio
import pytest

from envkit.errors import UsageError
from envkit.protocols import Trainer
from envkit.trainer_bridge.run_folder import checkpoint
from envkit.trainer_bridge.run_folder.checkpoint import RunState
from tests.trainer_bridge.fakes import ScriptedTrainer
from tests.trainer_bridge.models import write_tiny
from tests.trainer_bridge.run_folder.disk import FULL, full_disk
from tests.trainer_bridge.trainees import Trainee, draw_samples


def taught(version: int) -> ScriptedTrainer:
    trainer = ScriptedTrainer()
    trainer.version, trainer.weights = version, 10 * version
    return trainer


def save(folder: Path, trainer: Trainer, state: RunState, *, keep: int) -> Path:
    return anyio.run(partial(checkpoint.save, folder, trainer, state, keep=keep))


def keep(folder: Path, *steps: int, number: int = 100) -> None:
    for step in steps:
        save(folder, taught(step), RunState(step=step), keep=number)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# --- What is kept ----------------------------------------------------------------------------------------------------


def test_the_state_comes_back_as_it_was(tmp_path: Path) -> None:
    state = RunState(5, 40, 640, 3, 12.25, {"before": {"eval_success": 0.5}, "evaluated": 4})
    place = save(tmp_path, taught(5), state, keep=2)
    assert place == tmp_path / "step-5"
    assert checkpoint.load_state(place) == state
    trainer = ScriptedTrainer()
    anyio.run(trainer.restore, str(place))
    assert (trainer.version, trainer.weights) == (5, 50)


def test_the_newest_are_kept_by_number_and_not_by_name(tmp_path: Path) -> None:
    keep(tmp_path, 0, 9, 10, 100, 11, number=3)
    assert names(tmp_path) == ["step-10", "step-100", "step-11"]
    assert checkpoint.latest(tmp_path) == tmp_path / "step-100"


def test_a_missing_checkpoint_is_an_error(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(UsageError, match=f"^{folder}: no checkpoint to continue from; start without --resume$"):
            checkpoint.latest(folder)


def test_only_folders_of_steps_are_checkpoints(tmp_path: Path) -> None:
    keep(tmp_path, 2)
    for name in ("step-", "step-x", "step-7.bak", ".step-9", "other", "step--1"):
        (tmp_path / name).mkdir()
    assert checkpoint.latest(tmp_path) == tmp_path / "step-2"
    keep(tmp_path, 3, number=1)
    assert names(tmp_path) == [".step-9", "other", "step-", "step--1", "step-3", "step-7.bak", "step-x"]


@pytest.mark.parametrize("content", [None, "[]", "{", '{"step": 1, "what": 2}'])
def test_a_missing_or_invalid_state_is_refused(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "state.json").write_text(content)
    with pytest.raises(UsageError, match=f"^{tmp_path}: not a checkpoint: "):
        checkpoint.load_state(tmp_path)


# --- What is cut off -------------------------------------------------------------------------------------------------


def test_the_draft_of_a_killed_run_is_ignored(tmp_path: Path) -> None:
    keep(tmp_path, 2)
    draft = tmp_path / ".step-3"
    draft.mkdir()
    (draft / "weights.json").write_text("[3, ")
    (draft / "left-over").write_text("?")
    assert checkpoint.latest(tmp_path) == tmp_path / "step-2"
    keep(tmp_path, 3)
    assert names(tmp_path) == ["step-2", "step-3"]
    assert names(tmp_path / "step-3") == ["state.json", "weights.json"]


def test_a_checkpoint_is_not_lost_when_its_replacement_is_killed_halfway(tmp_path: Path) -> None:
    keep(tmp_path, 3)
    (tmp_path / "step-3").rename(tmp_path / ".step-3.old")  # the moment between the two renames
    assert checkpoint.latest(tmp_path) == tmp_path / "step-3"
    assert checkpoint.load_state(tmp_path / "step-3").step == 3
    assert names(tmp_path) == ["step-3"]


class Failing(ScriptedTrainer):
    """Fails after half of its files."""

    async def save(self, folder: str) -> None:
        (Path(folder) / "weights.json").write_text("[3, ")
        raise KeyboardInterrupt


def test_a_save_that_breaks_off_leaves_the_older_ones_and_nothing_else(tmp_path: Path) -> None:
    keep(tmp_path, 1, 2)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, Failing(), RunState(step=3), keep=1)
    assert names(tmp_path) == ["step-1", "step-2"]


# --- A full disk -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.1, 0.7])  # the disk fills in one file or another
def test_a_full_disk_is_reported_in_one_line_and_keeps_older_checkpoints(share: float, tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "policy", seed=1, hidden_size=32)
    trainee = Trainee(folder, tmp_path, preset="grpo", kl={"coefficient": 0.1})
    trainee.update(draw_samples(0, 4, folder))
    whole = save(tmp_path / "roomy", trainee.trainer, RunState(step=3), keep=1)
    needed = sum(path.stat().st_size for path in whole.rglob("*"))

    place = tmp_path / "disk"
    with full_disk(place, int(share * needed)):
        keep(place, 1, 2)
        with pytest.raises(UsageError, match=f"^{place}/step-3: {FULL}; .*--resume$") as caught:
            save(place, trainee.trainer, RunState(step=3), keep=1)
        assert "\n" not in str(caught.value)
        assert names(place) == ["step-1", "step-2"]
        assert checkpoint.load_state(checkpoint.latest(place)) == RunState(step=2)


class Pretrained(ScriptedTrainer):
    """Saves the weights of a policy and of a reference model."""

    async def save(self, folder: str) -> None:
        await super().save(folder)
        (Path(folder) / "policy").mkdir()
        (Path(folder) / "policy" / "model.safetensors").write_bytes(f"weights {self.weights}".encode())
        (Path(folder) / "reference.safetensors").write_bytes(b"reference")


def test_weights_that_did_not_change_take_no_second_place(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "model.safetensors").write_bytes(b"weights 0")
    folder, trainer = tmp_path / "checkpoints", Pretrained()
    for step in (0, 1):
        trainer.weights = step
        anyio.run(partial(checkpoint.save, folder, trainer, RunState(step=step), keep=2, source=source))
    first, second = folder / "step-0", folder / "step-1"
    assert (first / "policy" / "model.safetensors").samefile(source / "model.safetensors")
    assert (second / "policy" / "model.safetensors").read_bytes() == b"weights 1"
    assert (second / "reference.safetensors").samefile(first / "reference.safetensors")
