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
"""What reading a file of a checkpoint raises when it is not there, cut off, or another one."""


class Stateful(Protocol):
    """A part of the trainer whose state goes into ``optimizer.pt``."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> object: ...


def save(folder: Path, model: Any, tokenizer: Any, reference: Any, parts: Mapping[str, Stateful], version: int) -> None:
    """Write the policy as a model folder ``policy/``, and beside it everything else."""
    model.save_pretrained(folder / "policy")
    if tokenizer is not None:
        tokenizer.save_pretrained(folder / "policy")
    with (folder / "optimizer.pt").open("wb") as file:  # given a path, torch hides what the system said
        torch.save({name: part.state_dict() for name, part in parts.items()}, file)
    if reference is not None:
        safetensors.torch.save_model(reference, str(folder / "reference.safetensors"))
    share_weights(folder)
    (folder / "trainer.json").write_text(json.dumps({"version": version}))


def restore(folder: Path, model: Any, reference: Any, parts: Mapping[str, Stateful]) -> int:
    """Read what `save` wrote and return the version.

    Raises:
        UsageError: The folder does not hold a checkpoint of this policy and algorithm.
    """
    try:
        load_weights(model, folder / "policy")
        state = torch.load(folder / "optimizer.pt", weights_only=True, map_location="cpu")
        for name, part in parts.items():
            part.load_state_dict(state[name])  # copies to the device of the weights
        if reference is not None:
            load_weights(reference, folder / "reference.safetensors")
        return int(json.loads((folder / "trainer.json").read_text())["version"])
    except UNREADABLE as error:
        raise UsageError(f"{folder}: not a checkpoint of this policy and algorithm: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """Return in one line why a checkpoint cannot be read."""
    if isinstance(error, (EOFError, UnpicklingError)):
        return "optimizer.pt is damaged"
    if isinstance(error, KeyError):
        return f"it holds no {error.args[0]}"
    # What torch says about weights that do not fit is a headline and then a line for each of them.
    return shorten(" ".join(str(error).splitlines()[:2]), 300) or type(error).__name__
