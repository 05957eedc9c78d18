"""Files of weights: loading that leaves the model unchanged on an error, and folders of several files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from envkit.trainer_bridge.weights.files import checksum, load_weights
from tests.trainer_bridge.models import open_model


@pytest.mark.parametrize("damage", ["missing", "shape", "unknown"])
def test_a_load_that_fails_leaves_every_weight_as_it_was(damage: str, tiny_folder: Path, tmp_path: Path) -> None:
    model = open_model(tiny_folder)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    tensors = {name: weight + 1.0 for name, weight in load_file(tiny_folder / "model.safetensors").items()}
    last = sorted(tensors)[-1]
    if damage == "unknown":
        tensors["something.else"] = torch.zeros(2)
    elif damage == "shape":
        tensors[last] = torch.zeros(*tensors[last].shape, 2)
    else:
        del tensors[last]
    save_file(tensors, tmp_path / "weights.safetensors")
    with pytest.raises(RuntimeError, match=r"something\.else is unknown" if damage == "unknown" else last):
        load_weights(model, tmp_path / "weights.safetensors")
    assert all(torch.equal(before[name], weight) for name, weight in model.named_parameters())


def test_two_weights_that_change_places_change_the_checksum(tiny_folder: Path) -> None:
    model = open_model(tiny_folder)
    before = checksum(model, torch.float32)
    with torch.no_grad():
        layers = model.model.layers
        one, other = layers[0].mlp.up_proj.weight, layers[1].mlp.up_proj.weight
        one.data, other.data = other.data, one.data
    assert checksum(model, torch.float32) != before
