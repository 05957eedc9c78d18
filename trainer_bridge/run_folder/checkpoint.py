"""Checkpoints: a folder for each, written beside and renamed, so that one that can be seen is whole."""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import orjson

from envkit.errors import UsageError
from envkit.types import JSON

from ..models.saved_policy import SavedPolicy
from .writing import writing

_STATE = "state.json"
_NAME = re.compile(r"step-(\d+)")


@dataclass(slots=True)
class RunState:
    """What a run must know to go on, besides the weights.

    Attributes:
        step: Train steps done.
        episodes: Episodes played for training, void ones included.
        lost_episodes: Void ones among them.
        wall_s: Seconds of all parts of the run so far.
        facts: What was measured once and belongs into the summary, such as the evaluation before.
    """

    step: int = 0
    episodes: int = 0
    lost_episodes: int = 0
    wall_s: float = 0.0
    facts: dict[str, JSON] = field(default_factory=dict)


class Savable(Protocol):
    """A part of a checkpoint."""

    def save(self, folder: str) -> None:
        """Write all that is needed to go on into `folder`, which exists."""
        ...


def save(
    folder: Path,
    trainer: Savable,
    state: RunState,
    *,
    keep: int,
    policy: SavedPolicy | None = None,
    warmup: Savable | None = None,
) -> Path:
    """Write a checkpoint of `state.step` into `folder` and remove all but the newest `keep`.

    Args:
        folder: Of all checkpoints.
        trainer: Has the weights.
        state: Where the run is.
        keep: Number of checkpoints that stay.
        policy: What the checkpoint's ``policy/`` says about itself.
        warmup: Has the state of a warm-up that is not finished.

    Raises:
        UsageError: The disk is full or the folder cannot be written; older checkpoints are untouched.
    """
    target = folder / f"step-{state.step}"
    draft = folder / f".step-{state.step}"
    with writing(target):
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        try:
            trainer.save(str(draft))
            if policy is not None:
                policy.write(draft / "policy")
            if warmup is not None:
                warmup.save(str(draft))
            (draft / _STATE).write_bytes(orjson.dumps(dataclasses.asdict(state), option=orjson.OPT_INDENT_2))
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        aside = _aside(target)
        if target.exists():
            shutil.rmtree(aside, ignore_errors=True)
            target.replace(aside)
        draft.replace(target)
        shutil.rmtree(aside, ignore_errors=True)
    for old in _found(folder)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def latest(folder: Path) -> Path:
    """Return the newest checkpoint in `folder`; one that a killed `save` was about to replace is brought back first.

    Raises:
        UsageError: There is none.
    """
    for aside in folder.glob(".step-*.old"):
        target = folder / aside.name.removeprefix(".").removesuffix(".old")
        if not target.exists():
            aside.replace(target)
    found = _found(folder)
    if not found:
        raise UsageError(f"{folder}: no checkpoint to continue from; start without --resume")
    return found[-1]


def load_state(checkpoint: Path) -> RunState:
    """Read what `save` wrote about the run.

    Raises:
        UsageError: The folder is not a checkpoint.
    """
    try:
        content: Mapping[str, JSON] = orjson.loads((checkpoint / _STATE).read_bytes())
        return RunState(**content)  # type: ignore[arg-type]
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"{checkpoint}: not a checkpoint: {error}") from error


def _aside(target: Path) -> Path:
    """Where a checkpoint waits while its successor of the same step takes its place: no moment is without either."""
    return target.with_name(f".{target.name}.old")


def _found(folder: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    numbered = [(int(match[1]), path) for path in folder.glob("step-*") if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(numbered)]
