"""Atomic loading of weights from safetensors files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

INDEX = "model.safetensors.index.json"


@torch.no_grad()
def load_weights(model: Any, path: Path) -> None:
    """Copy weights from a file or a model folder into `model`, rounded to the model's data types.

    The names and shapes of all tensors are checked first, so weights of another model leave `model` unchanged. Tensors
    are then loaded one at a time, to save memory.

    Raises:
        OSError: A file is missing.
        RuntimeError: Names or shapes do not match the model.
        SafetensorError: A file is damaged.
    """
    files = [path]
    if path.is_dir():
        files = [path / "model.safetensors"]
        if (path / INDEX).exists():
            names = json.loads((path / INDEX).read_text())["weight_map"].values()
            files = [path / name for name in sorted(set(names))]
    targets: dict[str, torch.Tensor] = model.state_dict()
    found: set[int] = set()
    problems: list[str] = []
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  # `opened` is not a mapping
                shape = tuple(opened.get_slice(name).get_shape())
                if name not in targets:
                    problems.append(f"{name} is unknown")
                elif shape != tuple(targets[name].shape):
                    problems.append(f"{name} is {shape} instead of {tuple(targets[name].shape)}")
                else:
                    found.add(targets[name].data_ptr())
    problems += [f"{name} is missing" for name, target in targets.items() if target.data_ptr() not in found]
    if problems:
        raise RuntimeError(f"weights of another model: {'; '.join(problems[:3])}")
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                targets[name].copy_(opened.get_tensor(name))


@torch.no_grad()
def copy_weights(source: Any, model: Any) -> None:
    """Copy the weights of `source` into `model`, rounded to the data types of `model`."""
    for name, weight in source.named_parameters():
        model.get_parameter(name).copy_(weight)
