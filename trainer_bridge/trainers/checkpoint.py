"""The files of a trainer's checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from pickle import UnpicklingError
from textwrap import shorten
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from torch import nn

from envkit.errors import UsageError
from envkit.runs.files import share_weights
from envkit.types import TrainPhase

from ..weights import lora
from ..weights.files import load_weights, save_weights

_UNREADABLE = (OSError, EOFError, KeyError, RuntimeError, TypeError, ValueError, SafetensorError, UnpicklingError)
"""The exceptions that reading a missing, truncated or unrelated checkpoint file may raise."""


class Stateful(Protocol):
    """A part of the trainer whose state is saved in ``optimizer.pt``."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> object: ...


@dataclass(frozen=True, slots=True)
class About:
    """Where the trainer is: `version` is the number of updates in the phase so far, and `steps` that of all of them."""

    version: int
    phase: TrainPhase
    steps: int


@dataclass(frozen=True, slots=True)
class TrainedWeights:
    """The weights of `module` that are trained, as a part of a checkpoint."""

    module: nn.Module

    def state_dict(self) -> dict[str, Any]:
        return {name: weight.detach() for name, weight in self._trained()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the weights; raise `KeyError` or `RuntimeError` if they do not fit."""
        self.module.load_state_dict({name: state_dict[name] for name, _ in self._trained()}, strict=False)

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, weight) for name, weight in self.module.named_parameters() if weight.requires_grad]


def save(
    folder: Path, policy: Any, reference: Any, parts: Mapping[str, Stateful], about: About, *, shard_bytes: int
) -> None:
    """Write a trainer's checkpoint into the existing `folder`; files of weights have at most `shard_bytes`.

    The policy is saved as the model folder ``policy/``; if it has a LoRA adapter, the folder has only the adapter.
    `reference` is the reference policy, or None.
    """
    if lora.is_adapted(policy):
        lora.save_adapter(policy, folder / "policy")
    else:
        policy.save_pretrained(folder / "policy", max_shard_size=shard_bytes)
    # Pass torch an open file: if torch opens a path itself, it hides the operating system's error.
    with (folder / "optimizer.pt").open("wb") as file:
        torch.save({name: part.state_dict() for name, part in parts.items()}, file)
    if lora.is_adapted(reference):
        lora.save_adapter(reference, folder / "reference")
    elif reference is not None:
        save_weights(reference, folder / "reference.safetensors", reference.dtype, shard_bytes=shard_bytes)
    share_weights(folder)
    (folder / "trainer.json").write_text(json.dumps(asdict(about)))


def about(folder: Path) -> About:
    """Return what `save` got about the trainer.

    Raises:
        UsageError: The folder has no checkpoint.
    """
    with _reading(folder):
        return About(**json.loads((folder / "trainer.json").read_text()))


def restore(folder: Path, policy: Any, reference: Any, parts: Mapping[str, Stateful]) -> None:
    """Load a checkpoint that `save` wrote.

    Raises:
        UsageError: The folder has no checkpoint of this policy and algorithm.
    """
    with _reading(folder):
        _load(policy, folder / "policy")
        state = torch.load(folder / "optimizer.pt", weights_only=True, map_location="cpu")
        for name, part in parts.items():
            part.load_state_dict(state[name])  # This also moves the state to the device of the weights.
        if reference is not None:
            place = folder / "reference"
            _load(reference, place if place.is_dir() else place.with_suffix(".safetensors"))


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    try:
        yield
    except _UNREADABLE as error:
        raise UsageError(f"{folder}: not a checkpoint of this policy and algorithm: {_reason(error)}") from error


def _load(model: Any, place: Path) -> None:
    if lora.is_adapted(model):
        lora.load_adapter(model, place)
    else:
        load_weights(model, place)


def _reason(error: Exception) -> str:
    """Return one line with the reason why a checkpoint cannot be read."""
    if isinstance(error, (EOFError, UnpicklingError)):
        return "optimizer.pt is damaged"
    if isinstance(error, KeyError):
        return f"{error.args[0]} is missing"
    # torch's message about mismatched weights has a heading and a line per weight: show the heading and the first line.
    return shorten(" ".join(str(error).splitlines()[:2]), 300) or type(error).__name__
