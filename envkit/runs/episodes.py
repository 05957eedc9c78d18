"""Episode files: converting trajectories to records, selecting episodes to record, and reading the files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from envkit.errors import UsageError
from envkit.types import EpisodeRecord, GenerationRecord, Group, Trajectory, Turn, TurnRecord
from envkit.types.episodes import FORMAT

EPISODES = "episodes.jsonl"
"""Name of the file with the episodes of an evaluation."""

Decode = Callable[[Sequence[int]], str]
"""Function that converts token ids to text; see `envkit.protocols.Renderer.text`."""


def episode_of(trajectory: Trajectory, *, index: int, decode: Decode, train_step: int | None = None) -> EpisodeRecord:
    """Return the record of `trajectory`. `index` is the position of its task in the train step or evaluation."""
    task, start = trajectory.task, trajectory.start
    return EpisodeRecord(
        env_id=task.env_id,
        seed=task.seed,
        options=dict(task.options),
        index=index,
        member=trajectory.member,
        train_step=train_step,
        outcome=trajectory.outcome,
        start=None if start is None else start.observation,
        start_info={} if start is None else start.info,
        turns=tuple(_turn_of(turn, decode) for turn in trajectory.turns),
        system=None if start is None else start.system,
        tools=() if start is None else start.tools,
    )


def _turn_of(turn: Turn, decode: Decode) -> TurnRecord:
    return TurnRecord.of(turn.action, turn.step, turn.generation or _generation_of(turn, decode), turn.step_s)


def _generation_of(turn: Turn, decode: Decode) -> GenerationRecord | None:
    """Return what the policy read and wrote; None for a player that samples no tokens."""
    completion = turn.completion
    prompt_ids, completion_ids = tuple(turn.new_ids.tolist()), tuple(completion.token_ids.tolist())
    if not prompt_ids and not completion_ids:
        return None
    return GenerationRecord(
        prompt=decode(prompt_ids),
        completion=decode(completion_ids),
        finish=completion.finish,
        prompt_ids=prompt_ids,
        completion_ids=completion_ids,
        logprobs=tuple(completion.logprobs.tolist()),
        versions=completion.versions,
        seconds=turn.generate_s,
    )


def sample_episodes(groups: Sequence[Group], count: int, *, decode: Decode, train_step: int) -> list[EpisodeRecord]:
    """Return records of up to `count` episodes from as many groups as possible, in the order of the groups.

    If there are more than `count` groups, the result has one episode from each of `count` evenly spaced groups. If
    there are fewer, the result has several episodes of each group.
    """
    rounds = max((len(group.trajectories) for group in groups), default=0)
    if count < len(groups):
        chosen = [(number * len(groups) // count, 0) for number in range(count)]
    else:
        chosen = sorted([(index, member) for member in range(rounds) for index in range(len(groups))][:count])
    return [
        episode_of(groups[index].trajectories[member], index=index, decode=decode, train_step=train_step)
        for index, member in chosen
    ]


def read_episodes(path: Path, announce: Callable[[str], None] | None = None) -> list[EpisodeRecord]:
    """Return the episodes of a file.

    Args:
        path: The file.
        announce: Called with a line if the last line is incomplete because its writer was killed; it is left out. None:
            such a line is an error.

    Raises:
        UsageError: The file cannot be read, is empty, or has a line that is not an episode of this format.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from error
    lines = content.splitlines()
    if not lines:
        raise UsageError(f"{path}: is empty; it must have one JSON object per episode")
    if announce is not None and len(lines) > 1 and not content.endswith(b"\n"):
        announce(f"{path}: line {len(lines)} is incomplete and left out")
        lines.pop()
    return [_decoded(line, f"{path}: line {number}") for number, line in enumerate(lines, 1)]


_EPISODE = msgspec.json.Decoder(EpisodeRecord)


def _decoded(line: bytes, location: str) -> EpisodeRecord:
    try:
        found = msgspec.json.decode(line, type=_Format).format
        episode = _EPISODE.decode(line) if found == FORMAT else None
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise UsageError(
            f"{location} is damaged or not an episode of format {FORMAT} ({error}); record it again or use another file"
        ) from None
    if episode is None:
        raise UsageError(f"{location} has format {found}, but envkit reads format {FORMAT}; record the episodes again")
    return episode


class _Format(msgspec.Struct):
    format: int
