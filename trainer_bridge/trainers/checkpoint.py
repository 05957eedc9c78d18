"""The files of a trainer's checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from textwrap import shorten
from typing import Any, Protocol

import safetensors.torch
import torch
from safetensors import SafetensorError

from envkit.errors import UsageError

from ..engines.weight_files import load_weights
from ..run_folder.writing import share_weights

UNREADABLE = (OSError, EOFError, KeyError, RuntimeError, TypeError, ValueError, SafetensorError, UnpicklingError)
"""The exceptions that reading a missing, truncated or unrelated checkpoint file may raise."""


class Stateful(Protocol):
    """A part of the trainer whose state is saved in ``optimizer.pt``."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> object: ...


def save(folder: Path, model: Any, tokenizer: Any, reference: Any, parts: Mapping[str, Stateful], version: int) -> None:
    """Write a trainer's checkpoint into the existing `folder`. The policy is saved as the model folder ``policy/``."""
    model.save_pretrained(folder / "policy")
    if tokenizer is not None:
        tokenizer.save_pretrained(folder / "policy")
    # Pass torch an open file: if torch opens a path itself, it hides the operating system's error.
    with (folder / "optimizer.pt").open("wb") as file:
        torch.save({name: part.state_dict() for name, part in parts.items()}, file)
    if reference is not None:
        safetensors.torch.save_model(reference, str(folder / "reference.safetensors"))
    share_weights(folder)
    (folder / "trainer.json").write_text(json.dumps({"version": version}))


def restore(folder: Path, model: Any, reference: Any, parts: Mapping[str, Stateful]) -> int:
    """Load a checkpoint that `save` wrote, and return the version of its weights.

    Raises:
        UsageError: The folder has no checkpoint of this policy and algorithm.
    """
    try:
        load_weights(model, folder / "policy")
        state = torch.load(folder / "optimizer.pt", weights_only=True, map_location="cpu")
        for name, part in parts.items():
            part.load_state_dict(state[name])  # This also moves the state to the device of the weights.
        if reference is not None:
            load_weights(reference, folder / "reference.safetensors")
        return int(json.loads((folder / "trainer.json").read_text())["version"])
    except UNREADABLE as error:
        raise UsageError(f"{folder}: not a checkpoint of this policy and algorithm: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """Return one line with the reason why a checkpoint cannot be read."""
    if isinstance(error, (EOFError, UnpicklingError)):
        return "optimizer.pt is damaged"
    if isinstance(error, KeyError):
        return f"{error.args[0]} is missing"
    # torch's message about mismatched weights has a heading and a line per weight: show the heading and the first line.
    return shorten(" ".join(str(error).splitlines()[:2]), 300) or type(error).__name__
