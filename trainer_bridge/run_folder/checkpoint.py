"""Checkpoints of a run. Each checkpoint is a folder, written under a temporary name and renamed when complete."""

from __future__ import annotations

import dataclasses
import filecmp
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import orjson

from envkit import clock
from envkit.errors import UsageError
from envkit.runs.files import writing
from envkit.types import JSON

from ..models.saved_policy import SavedPolicy
from .record import numbered

_STATE = "state.json"


@dataclass(slots=True)
class RunState:
    """The state that a run needs to resume, besides the weights.

    Attributes:
        step: Number of finished train steps.
        imitated: Number of finished updates of imitation, before the first train step.
        episodes: Number of episodes played for training, including void episodes.
        lost_episodes: Number of void episodes, such as those whose sandbox was lost.
        wall_s: Duration of the run so far in seconds, including the parts before a resume.
        facts: Results for ``summary.json`` that a resumed run does not compute again, such as the first evaluation.
        accounting: Numbers of attempts at training episodes and of tokens; see `scheduler.accounting.Ledger.counts`.
        schedule: Which groups are played next; see `scheduler.continuous.Continuous.state`.
        probe_prompt: Token ids of the prompt that probes the engine after each push: the first prompt of the run; empty
            until it is known.
        best_step: Train step with the highest success of all evaluations with sampled completions so far; the last of
            several. None before the first evaluation.
        best_success: The success in this evaluation, or the return if the environment does not report success.
    """

    step: int = 0
    imitated: int = 0
    episodes: int = 0
    lost_episodes: int = 0
    wall_s: float = 0.0
    facts: dict[str, JSON] = field(default_factory=dict)
    accounting: dict[str, int] = field(default_factory=dict)
    schedule: dict[str, JSON] = field(default_factory=dict)
    probe_prompt: list[int] = field(default_factory=list)
    best_step: int | None = None
    best_success: float | None = None


class Savable(Protocol):
    """An object whose state is part of a checkpoint."""

    async def save(self, folder: str) -> None:
        """Write the state that a resume needs into the existing `folder`."""
        ...


async def save(
    folder: Path,
    trainer: Savable,
    state: RunState,
    *,
    keep: int,
    policy: SavedPolicy | None = None,
    source: Path | None = None,
) -> Path:
    """Write the checkpoint of train step `state.step` into `folder`.

    All other checkpoints but the newest `keep` and that of the best evaluation (`state.best_step`) are removed. Files
    of weights that equal those of the newest checkpoint or of `source`, such as the reference model's and an untrained
    policy's, become hard links to them, if all are on one disk. `policy` is written into ``policy/``.

    Raises:
        UsageError: The disk is full or the folder cannot be written; older checkpoints are kept.
    """
    content = orjson.dumps(
        dataclasses.asdict(state), option=orjson.OPT_INDENT_2
    )  # now: an evaluation may end meanwhile
    target = folder / f"step-{state.step}"
    draft = folder / f".step-{state.step}"
    with writing(target):
        await clock.to_thread(_begin, draft)
        try:
            await trainer.save(str(draft))
            await clock.to_thread(_link_equal, draft, numbered(folder, "")[-1:], source)
            await clock.to_thread(_finish, draft, target, content, policy)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
    best = folder / f"step-{state.best_step}"
    for _, old in numbered(folder, "")[:-keep]:
        if old != best:
            shutil.rmtree(old, ignore_errors=True)
    return target


def _begin(draft: Path) -> None:
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)


def _link_equal(draft: Path, newest: Sequence[tuple[int, Path]], source: Path | None) -> None:
    """Replace files of weights in `draft` by hard links to equal files of other checkpoints and of the source."""
    for file in draft.rglob("*.safetensors"):
        name = file.relative_to(draft)
        others = [checkpoint / name for _, checkpoint in newest]
        if source is not None and name.parent.name == "policy":
            others.append(source / name.name)
        for other in others:
            with suppress(OSError):  # no such file, another disk, or a file system without links
                if filecmp.cmp(other, file, shallow=False):
                    link = file.with_suffix(".link")
                    link.hardlink_to(other.resolve())
                    link.replace(file)
                    break


def _finish(draft: Path, target: Path, state: bytes, policy: SavedPolicy | None) -> None:
    """Write the remaining files of a checkpoint, and rename it to its final name."""
    if policy is not None:
        policy.write(draft / "policy")
    (draft / _STATE).write_bytes(state)
    aside = target.with_name(f".{target.name}.old")
    if target.exists():
        shutil.rmtree(aside, ignore_errors=True)
        target.replace(aside)
    draft.replace(target)
    shutil.rmtree(aside, ignore_errors=True)


def latest(folder: Path) -> Path:
    """Return the newest checkpoint in `folder`. If replacing a checkpoint was interrupted, first restore the old one.

    Raises:
        UsageError: There are no checkpoints.
    """
    for aside in folder.glob(".step-*.old"):
        target = folder / aside.name.removeprefix(".").removesuffix(".old")
        if not target.exists():
            aside.replace(target)
    if not (found := numbered(folder, "")):
        raise UsageError(f"{folder}: no checkpoint to continue from; start without --resume")
    return found[-1][1]


def load_state(checkpoint: Path) -> RunState:
    """Read the state of the run from a checkpoint.

    Raises:
        UsageError: The folder is not a checkpoint.
    """
    try:
        content: Mapping[str, JSON] = orjson.loads((checkpoint / _STATE).read_bytes())
        return RunState(**content)  # type: ignore[arg-type]
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"{checkpoint}: not a checkpoint: {error}") from error
