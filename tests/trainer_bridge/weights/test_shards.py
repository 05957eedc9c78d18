"""Weights of large models in several files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from envkit import clock
from envkit.trainer_bridge.engines.transformers import TransformersEngine
from envkit.trainer_bridge.weights.channel import WeightChannel
from envkit.trainer_bridge.weights.files import INDEX, checksum, load_weights, save_weights
from envkit.trainer_bridge.weights.lora import LoraSettings
from tests.trainer_bridge.models import open_model, shake, write_tiny
from tests.trainer_bridge.trainees import Trainee, draw_samples


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy of 2.3 MiB in float32, with matrices of 128 to 256 KiB."""
    return write_tiny(tmp_path_factory.mktemp("wide") / "policy", seed=1, hidden_size=160)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_above_the_limit_are_split_and_read_again(dtype: torch.dtype, folder: Path, tmp_path: Path) -> None:
    learning, playing = open_model(folder), open_model(folder)
    shake(learning, 5)
    place = save_weights(learning, tmp_path / "version-3.safetensors", dtype, shard_bytes=300_000)
    assert place == tmp_path / "version-3"
    index = json.loads((place / INDEX).read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-{number:05}-of-{len(files):05}.safetensors" for number in range(1, len(files) + 1)]
    assert {path.name for path in place.iterdir()} == {INDEX, *files}
    tensors = {name: load_file(place / name) for name in files}
    sizes = [sum(tensor.nbytes for tensor in held.values()) for held in tensors.values()]
    assert max(sizes) <= 300_000
    assert sum(sizes) == index["metadata"]["total_size"]
    assert index["weight_map"] == {name: file for file, held in tensors.items() for name in held}
    load_weights(playing, place)
    for name, weight in learning.named_parameters():
        assert torch.equal(playing.get_parameter(name), weight.to(dtype).float())
    assert checksum(learning, dtype) == checksum(playing, dtype)


def test_an_engine_gets_each_version_in_several_files_and_the_older_folder_is_removed(
    folder: Path, tmp_path: Path
) -> None:
    trainee = Trainee(folder, tmp_path / "weights", preset="grpo", adapter=LoraSettings(2, 4.0), shard_mib=1)
    playing = open_model(folder)
    channel = WeightChannel(trainee.trainer, TransformersEngine(playing, pad_id=0))
    for version in range(2):
        push = clock.run(channel.push)
        assert push.weights.location == str(tmp_path / "weights" / f"version-{version}")
        assert [path.name for path in (tmp_path / "weights").iterdir()] == [f"version-{version}"]
        assert len(list(Path(push.weights.location).glob("*.safetensors"))) == 2
        assert push.weights.checksum == checksum(playing, torch.float32)
        trainee.update(draw_samples(version, 8, folder))


def test_a_checkpoint_is_split_and_restored_bit_for_bit(folder: Path, tmp_path: Path) -> None:
    how: dict[str, Any] = {"preset": "grpo", "kl": {"coefficient": 0.1}, "shard_mib": 1}
    unbroken = Trainee(folder, None, **how)
    unbroken.update(draw_samples(0, 8, folder))
    unbroken.save(tmp_path)
    for name in ("policy", "reference"):
        files = list((tmp_path / name).glob("*.safetensors"))
        assert len(files) == 2
        assert max(path.stat().st_size for path in files) < 1.1 * 2**20
    restored = Trainee(write_tiny(tmp_path / "other", seed=77, hidden_size=160), None, **how)
    restored.restore(tmp_path)
    for trainee in (unbroken, restored):
        trainee.update(draw_samples(1, 8, folder))
    assert restored.weights() == unbroken.weights()
    assert restored.reference.state_dict().keys() == unbroken.reference.state_dict().keys()
    for name, weight in unbroken.reference.named_parameters():
        assert torch.equal(restored.reference.get_parameter(name), weight)
