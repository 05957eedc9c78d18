"""The files of the trainer: weights for the engine, and checkpoints for an identical continuation."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import anyio
import pytest
import safetensors.torch
import torch

from envkit import clock
from envkit.errors import UsageError
from envkit.types import SamplingParams
from tests.trainer_bridge.models import open_model, slow_generate, write_tiny
from tests.trainer_bridge.trainees import KINDS, Trainee, draw_samples
from tests.trainer_bridge.trainers.own_parts import TWO_CRITICS


def learn(trainee: Trainee, folder: Path, seed: int) -> Mapping[str, float]:
    return trainee.update(draw_samples(seed, 8, folder))


# --- Going on --------------------------------------------------------------------------------------------------------


def test_a_checkpoint_is_as_large_as_the_trainer_says(tiny_folder: Path, tmp_path: Path) -> None:
    trainee = Trainee(tiny_folder, tmp_path, **KINDS["ppo"])
    learn(trainee, tiny_folder, 0)
    clock.run(trainee.trainer.save, str(tmp_path))
    files = [*tmp_path.glob("policy/*.safetensors"), tmp_path / "optimizer.pt"]
    size = sum(file.stat().st_size for file in files)
    assert 0 <= size - trainee.trainer.checkpoint_bytes < 64_000  # names and shapes


SCHEDULE = {"schedule": "cosine", "steps": 5, "schedule_warmup_steps": 2, "weight_decay": 0.1}


@pytest.mark.parametrize(
    ("how", "phase"),
    [
        (KINDS["grpo with kl"], "reinforcement"),
        ({**KINDS["ppo"], **SCHEDULE}, "reinforcement"),
        ({"algorithm": TWO_CRITICS}, "reinforcement"),
        (KINDS["ppo"], "imitation, Muon"),
        (KINDS["ppo"], "imitation, AdamW"),
    ],
)
def test_a_restored_trainer_goes_on_bit_for_bit(how: Any, phase: str, tiny_folder: Path, tmp_path: Path) -> None:
    unbroken = Trainee(tiny_folder, tmp_path, imitation_rate=0.01, imitates_with_muon="Muon" in phase, **how)
    if phase != "reinforcement":
        anyio.run(unbroken.trainer.begin, "imitation", 5)
    learn(unbroken, tiny_folder, 0)
    place = tmp_path / "checkpoint"
    place.mkdir()
    unbroken.save(place)
    expected = learn(unbroken, tiny_folder, 1)

    # What the second part of a run starts from differs in every weight; nothing of it may be left.
    other = write_tiny(tmp_path / "other", seed=77)
    second = Trainee(other, tmp_path, imitation_rate=0.01, imitates_with_muon="Muon" in phase, **how)
    second.restore(place)
    assert second.trainer.version == 1
    assert learn(second, tiny_folder, 1) == expected
    assert second.weights() == unbroken.weights()
    assert second.trainer.version == unbroken.trainer.version == 2


def test_a_checkpoint_holds_a_model_folder_that_plays_like_the_policy(tiny_folder: Path, tmp_path: Path) -> None:
    trainee = Trainee(tiny_folder, tmp_path, preset="grpo")
    learn(trainee, tiny_folder, 0)
    trainee.save(tmp_path)
    reread = open_model(tmp_path / "policy")
    how = SamplingParams(max_tokens=12, seed=5)
    assert slow_generate(reread, [1, 5, 6], how) == slow_generate(trainee.model, [1, 5, 6], how)


# --- Checkpoints that are no good ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns the checkpoint of a kind of algorithm after an update."""

    @cache
    def checkpoint(kind: str) -> Path:
        trainee = Trainee(tiny_folder, None, **KINDS[kind])
        learn(trainee, tiny_folder, 0)
        trainee.save(place := tmp_path_factory.mktemp("checkpoint"))
        return place

    return checkpoint


def refuses(trainee: Trainee, place: Path) -> str:
    with pytest.raises(UsageError) as caught:
        trainee.restore(place)
    text = str(caught.value)
    assert text.startswith(f"{place}: not a checkpoint of this policy and algorithm: ")
    assert "\n" not in text
    assert len(text) > len(f"{place}: not a checkpoint of this policy and algorithm: ")
    return text


@pytest.mark.parametrize("shape", [{"hidden_size": 32}, {"layers": 1}])
def test_a_checkpoint_of_another_shape_is_refused(shape: Any, saved: Callable[[str], Path], tmp_path: Path) -> None:
    other = write_tiny(tmp_path / "other", seed=1, **shape)
    refuses(Trainee(other, None, **KINDS["ppo"]), saved("ppo"))


def test_a_checkpoint_of_another_algorithm_is_refused(
    saved: Callable[[str], Path], tiny_folder: Path, tmp_path: Path
) -> None:
    place = saved("grpo")
    assert "critic" in refuses(Trainee(tiny_folder, tmp_path, **KINDS["ppo"]), place)
    assert "reference" in refuses(Trainee(tiny_folder, tmp_path, **KINDS["grpo with kl"]), place)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("policy/model.safetensors", "cut"),
        ("optimizer.pt", "empty"),
        ("optimizer.pt", "garbled"),
        ("trainer.json", "garbled"),
        ("reference.safetensors", "missing"),
    ],
)
def test_a_damaged_checkpoint_is_refused_in_one_line(
    name: str, damage: str, saved: Callable[[str], Path], tiny_folder: Path, tmp_path: Path
) -> None:
    place = shutil.copytree(saved("grpo with kl"), tmp_path / "checkpoint")
    file = place / name
    content = file.read_bytes()
    if damage == "missing":
        file.unlink()
    elif damage == "empty":
        file.write_bytes(b"")
    elif damage == "cut":
        file.write_bytes(content[: len(content) // 2])
    else:
        file.write_bytes(b"\xff\x00\x80 nonsense " * 50)
    refuses(Trainee(tiny_folder, tmp_path, **KINDS["grpo with kl"]), place)


# --- Publishing ------------------------------------------------------------------------------------------------------


def test_a_trainer_without_a_folder_publishes_no_file(tiny_folder: Path) -> None:
    weights = Trainee(tiny_folder, None, preset="grpo").publish()
    assert (weights.version, weights.location) == (0, "")


@pytest.mark.parametrize("engine_dtype", ["float32", "bfloat16"])
def test_the_checksum_changes_with_the_weights_that_the_engine_gets(
    engine_dtype: str, tiny_folder: Path, tmp_path: Path
) -> None:
    trainee = Trainee(tiny_folder, tmp_path, preset="grpo", engine_dtype=engine_dtype)
    before = trainee.publish()
    with torch.no_grad():
        weight = trainee.model.get_input_embeddings().weight
        weight[3, 3] *= 1 + 1e-6  # a change that bfloat16 cannot represent
        tiny = trainee.publish()
        weight[3, 3] += 1.0
        large = trainee.publish()
    assert (tiny.checksum == before.checksum) == (engine_dtype == "bfloat16")
    assert large.checksum != before.checksum
    (written,) = {tensor.dtype for tensor in safetensors.torch.load_file(large.location).values()}
    assert written == getattr(torch, engine_dtype)
