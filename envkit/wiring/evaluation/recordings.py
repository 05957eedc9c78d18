"""Recorded episodes on disk: those of a run's train steps, or those of an evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from envkit.errors import UsageError
from envkit.trainer_bridge.run_folder.episodes import EPISODES, read_episodes
from envkit.trainer_bridge.run_folder.record import CONFIG, recorded_steps, refuse_other_format
from envkit.types import EpisodeRecord

_MAX_LISTED = 12
"""Numbers that an error lists."""


def open_recording(place: Path, *, step: int | None = None) -> tuple[Path, list[EpisodeRecord]]:
    """Return the file at `place` and its episodes, at least one, in order.

    Args:
        place: A run's folder, a folder that `envkit eval --output` wrote, or a ``.jsonl`` file of either.
        step: Train step of a run; None takes the newest that is recorded.

    Raises:
        UsageError: There are no episodes, none of this train step, the run has another format, or the file is damaged.
    """
    path = _find(place, step)
    return path, read_episodes(path)


def _find(place: Path, step: int | None) -> Path:
    if not place.exists():
        raise UsageError(f"{place}: no such folder or file; name a run, such as runs/quickstart, or one of its files")
    refuse_other_format(place)
    steps = recorded_steps(place) if place.is_dir() else {}
    if steps:
        if step is not None and step not in steps:
            raise UsageError(f"{place}: train step {step} is not recorded; recorded are {listed(list(steps))}")
        return steps[max(steps) if step is None else step]
    path = place / EPISODES if place.is_dir() else place
    if path.is_file():
        if step is not None:
            raise UsageError(f"{path}: is one file of episodes, so --step {step} cannot be chosen; leave out --step")
        return path
    if (place / CONFIG).is_file():
        raise UsageError(
            f"{place}: this run has not recorded any episodes; it does so at its first train step, "
            "unless tracking.trajectories_every is 0"
        )
    raise UsageError(
        f"{place}: holds no episodes; name the folder of envkit train, or that of envkit eval with --output"
    )


def listed(numbers: Sequence[int]) -> str:
    """Return numbers for a message; of many, the first and the last."""
    if len(numbers) <= _MAX_LISTED:
        return ", ".join(map(str, numbers))
    half = _MAX_LISTED // 2
    return f"{listed(numbers[:half])}, ..., {listed(numbers[-half:])}"
