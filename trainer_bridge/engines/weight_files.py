"""Reading weights from safetensors files: all of them or none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

INDEX = "model.safetensors.index.json"


@torch.no_grad()
def load_weights(model: Any, place: Path) -> None:
    """Copy weights from a file, or from a model folder with one file or several, rounding to the model's formats.

    Names and shapes are checked first, so a failure leaves the model as it was. One tensor at a time is in memory.

    Raises:
        OSError: A file is missing.
        RuntimeError: Names or shapes are not those of the model.
        SafetensorError: A file is damaged.
    """
    files = [place]
    if place.is_dir():
        files = [place / "model.safetensors"]
        if (place / INDEX).exists():
            names = json.loads((place / INDEX).read_text())["weight_map"].values()
            files = [place / name for name in sorted(set(names))]
    targets: dict[str, torch.Tensor] = model.state_dict()
    found: set[int] = set()
    problems: list[str] = []
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  # not a mapping
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
    """Copy the weights of a model in this process, rounding to the other's formats."""
    for name, weight in source.named_parameters():
        model.get_parameter(name).copy_(weight)
