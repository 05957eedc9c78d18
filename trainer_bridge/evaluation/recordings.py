"""Reads the episodes that a training run or an evaluation has recorded on disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from envkit.errors import UsageError
from envkit.runs.episodes import EPISODES, read_episodes
from envkit.types import JSON, EpisodeRecord

from ..run_folder.record import CONFIG, recorded_steps, refuse_other_format

_MAX_LISTED = 8


def open_recording(
    source: Path, announce: Callable[[str], None], *, step: int | None = None
) -> tuple[Path, list[EpisodeRecord]]:
    """Return the path of a file with recorded episodes, and its episodes (at least one) in the order of the file.

    Args:
        source: Folder of a run, folder of `envkit eval --output`, or a ``.jsonl`` file in such a folder.
        announce: As in `read_episodes`.
        step: Train step of a run; None means the last recorded step.

    Raises:
        UsageError: There are no episodes or no such train step, or the files are damaged or of another format.
    """
    path = _find(source, step)
    return path, read_episodes(path, announce)


def _find(source: Path, step: int | None) -> Path:
    if not source.exists():
        raise UsageError(f"{source}: no such folder or file; name a run, such as runs/quickstart, or one of its files")
    refuse_other_format(source)
    steps = recorded_steps(source) if source.is_dir() else {}
    if steps:
        if step is not None and step not in steps:
            raise UsageError(f"{source}: train step {step} is not recorded; recorded are {listed(list(steps))}")
        return steps[max(steps) if step is None else step]
    path = source / EPISODES if source.is_dir() else source
    if path.is_file():
        if step is not None:
            raise UsageError(f"{path}: its episodes belong to no train step; leave out --step {step}")
        return path
    if (source / CONFIG).is_file():
        raise UsageError(
            f"{source}: this run has not recorded episodes yet; wait for its first train step, "
            "or set tracking.trajectories_every above 0 in its training file"
        )
    raise UsageError(f"{source}: has no episodes; name the folder of envkit train or of envkit eval --output")


def listed(numbers: Sequence[int]) -> str:
    """Return the numbers as text for a message; a long list shows only its first numbers and its last one."""
    shown = ", ".join(map(str, numbers[:_MAX_LISTED]))
    return shown if len(numbers) <= _MAX_LISTED else f"{shown}, ..., {numbers[-1]}"


def dialogue_of(episode: EpisodeRecord) -> dict[str, JSON]:
    """Return an episode as a dialogue for ``imitation.kind: dialogues``.

    Raises:
        UsageError: The environment has tools, whose calls a dialogue cannot contain.
    """
    if episode.tools:
        raise UsageError(
            f"--dialogues: {episode.env_id} has tools, whose calls a dialogue cannot contain; leave it out"
        )
    messages: list[JSON] = [] if episode.system is None else [{"role": "system", "content": episode.system}]
    observation = episode.start
    for turn in episode.turns:
        assert observation is not None
        messages.append({"role": "user", "content": observation.text})
        messages.append({"role": "assistant", "content": turn.action})
        observation = turn.observation
    return {"messages": messages}
