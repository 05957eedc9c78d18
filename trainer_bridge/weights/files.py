"""Weights in safetensors files: saving, loading that leaves the model unchanged on an error, and checksums.

Tensors in files have the names and shapes that `save_pretrained` gives them. For a mixture of experts, these differ
from those in the model: the model has one tensor for all experts of a layer, and a file has tensors for each expert.

The weights of a model with a LoRA adapter (see `lora`) are those of the plain model with the adapter added. They are
computed one tensor at a time.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from envkit.errors import UsageError
from envkit.types import stable_hash

try:
    from transformers.core_model_loading import revert_weight_conversion
except ImportError:  # in transformers 4, a model has the tensors of its files

    def revert_weight_conversion(model: PreTrainedModel, state_dict: dict[str, Tensor]) -> Any:
        return state_dict


INDEX = "model.safetensors.index.json"
ADAPTER = "default"
"""peft's name of the adapter inside a model."""

_BASE = ".base_layer."


@torch.no_grad()
def named_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of `model`, with its adapter added, and their names in the plain model; tied weights once."""
    for name, weight in _plain(model):
        if _BASE in name and name.endswith(".weight"):
            weight = merged(model.get_submodule(name[: name.rindex(_BASE)]))
        yield name.replace(_BASE, "."), weight.detach()


def is_of_adapter(name: str) -> bool:
    """Return whether the weight `name` of a model is one of its adapter."""
    return name.endswith((f".lora_A.{ADAPTER}.weight", f".lora_B.{ADAPTER}.weight"))


def merged(layer: Any) -> Tensor:
    """Return the float32 weight of a linear layer with an adapter: the sum of both."""
    weight: Tensor = layer.base_layer.weight.float() + layer.get_delta_weight(ADAPTER).float()
    return weight


@torch.no_grad()
def in_files(model: Any, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield `weights`, which have their names in `model`, as the tensors of a file: views, with their names there.

    Raises:
        UsageError: A tensor of a file has parts of several weights of the model.
    """
    names: set[str] = set()
    for name, weight in weights:
        parts = _saved_as(model, name, weight)
        if parts is None or names & set(parts):
            raise UsageError(f"{type(model).__name__}: its files join or change weights, which envkit does not support")
        names |= set(parts)
        yield from parts.items()


_View = tuple[str, list[int], list[int], int]
"""A view of a weight: its name in a file, shape, strides, and offset in the weight."""
_views: WeakKeyDictionary[Any, dict[str, list[_View] | None]] = WeakKeyDictionary()
"""The views of each weight, by model and name: finding those of fused experts takes several times their memory."""


def _saved_as(model: Any, name: str, weight: Tensor) -> dict[str, Tensor] | None:
    """Return views of a contiguous `weight` by their names in a file; None if the file does not have plain parts."""
    known = _views.setdefault(model, {})
    if name not in known:
        known[name] = _find_views(model, name, weight)
    if (views := known[name]) is None:
        return None
    start = weight.storage_offset()
    return {key: weight.as_strided(shape, stride, start + first) for key, shape, stride, first in views}


def _find_views(model: Any, name: str, weight: Tensor) -> list[_View] | None:
    parts: dict[str, Tensor] = revert_weight_conversion(model, {name: weight})
    if all(part.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr() for part in parts.values()):
        start = weight.storage_offset()
        return [
            (key, list(one.shape), list(one.stride()), int(one.storage_offset() - start)) for key, one in parts.items()
        ]
    # transformers has copied some parts. To find the views, let it take the same parts of the places in the weight.
    place = torch.arange(weight.numel()).view(weight.shape)
    views: list[_View] = []
    for key, part in revert_weight_conversion(model, {name: place}).items():
        first = int(part[(0,) * part.ndim])
        lines = [part.movedim(axis, -1).reshape(-1, size)[0] for axis, size in enumerate(part.shape)]
        stride = [int(line[-1] - first) // max(len(line) - 1, 1) for line in lines]
        if not torch.equal(place.as_strided(part.shape, stride, first), part):
            return None
        views.append((key, list(part.shape), stride, first))
    return views


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
    fill(dict(in_files(model, model.state_dict().items())), files)


@torch.no_grad()
def fill(targets: Mapping[str, Tensor], files: Sequence[Path]) -> None:
    """Copy the tensors in `files` into those of `targets` with the same names; see `load_weights`."""
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
    for name, weight in named_weights(source):
        model.get_parameter(name).copy_(weight)


def save_weights(model: Any, path: Path, dtype: torch.dtype, *, shard_bytes: int | None = None) -> Path:
    """Write the weights of `model`, rounded to `dtype`, as `save_pretrained` does; tied weights are written once.

    Args:
        model: The model.
        path: File for the weights. If they take more than `shard_bytes`, they are split into several files with an
            index, in a folder with the name of `path` without its suffix.
        dtype: Number format.
        shard_bytes: Maximum size of the tensors in a file; None for no limit. A larger tensor has its own file. All
            tensors of a file are in memory at once.

    Returns:
        The file or the folder.

    Raises:
        OSError, SafetensorError: A file cannot be written.
    """
    plain = ((name.replace(_BASE, "."), weight.detach()) for name, weight in _plain(model))
    sizes = {name: torch.empty(one.shape, dtype=dtype, device="meta") for name, one in in_files(model, plain)}
    limit = shard_bytes or sys.maxsize
    split = split_torch_state_dict_into_shards(
        sizes, filename_pattern="model{suffix}.safetensors", max_shard_size=limit
    )
    folder = path.parent
    if split.is_sharded:
        folder = path.with_suffix("")
        folder.mkdir(exist_ok=True)
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index, indent=2))
    shards: dict[str, dict[str, Tensor]] = {file: {} for file in split.filename_to_tensors}
    for name, weight in in_files(model, named_weights(model)):
        file = split.tensor_to_filename[name]
        shards[file][name] = weight.to("cpu", dtype, copy=True).contiguous()
        if len(shards[file]) == len(split.filename_to_tensors[file]):
            save_file(shards.pop(file), folder / file if split.is_sharded else path, metadata={"format": "pt"})
    return folder if split.is_sharded else path


def checksum(model: Any, dtype: torch.dtype) -> int:
    """Return a checksum of the weights of `model`, rounded to `dtype`."""
    return checksum_of((weight for _, weight in named_weights(model)), dtype)


@torch.no_grad()
def checksum_of(weights: Iterable[Tensor], dtype: torch.dtype) -> int:
    """Return a checksum of tensors, rounded to `dtype`."""
    bits = torch.int32 if dtype.itemsize == 4 else torch.int16
    return stable_hash(*[int(weight.to(dtype).view(bits).sum(dtype=torch.int64)) for weight in weights])


def _plain(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of `model` without those of its adapter."""
    return ((name, weight) for name, weight in model.named_parameters() if not is_of_adapter(name))
