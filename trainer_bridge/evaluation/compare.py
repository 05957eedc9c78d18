"""Comparison of two evaluations: settings that differ, the paired difference, and the tasks that flipped."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import cast

import orjson

from envkit.errors import UsageError
from envkit.runs.episodes import EPISODES, read_episodes
from envkit.runs.printable import counted
from envkit.types import JSON, EpisodeRecord, Task

from ..run_folder.record import leaves
from .result import FORMAT
from .statistics import estimate
from .table import row, table

EVALUATION = "evaluation.json"
_MAX_FLIPS = 20


def compare(one: Path, other: Path) -> Iterator[str]:
    """Yield the lines of a comparison of two folders of ``envkit eval --output``.

    The differences are paired: each is the mean over the tasks that both have finished, of the difference between the
    means over the attempts at the task.

    Raises:
        UsageError: A folder has no finished evaluation of this format; or, after the lines with the settings, the two
            have no task in common.
    """
    (a, before), (b, after) = (_read(path.parent if path.name == EVALUATION else path) for path in (one, other))
    common = sorted(before.keys() & after.keys())
    yield f"A: {one} ({a['policy']} on {a['env_id']}), B: {other} ({b['policy']} on {b['env_id']})"
    changed = [f"  {key}: {old} -> {new}" for key, old, new in differences(_settings(a), _settings(b))]
    yield from ["settings that differ (A -> B):", *changed] if changed else ["the settings are equal"]
    if not common:
        raise UsageError(f"{one} and {other} have no task in common; evaluate with the same seed, split and options")
    if a["task_set"] != b["task_set"]:
        left = len(before.keys() ^ after.keys())
        yield f"the task sets differ: {len(common)} tasks are in both, {left} in only one, which do not count"
    rows, flips = [], []
    for name in ("success", "return"):
        pairs = [(key, _mean(before[key], name), _mean(after[key], name)) for key in common]
        known = [(key, x, y) for key, x, y in pairs if not math.isnan(x + y)]
        if known:
            rows.append(row(f"{name} of A", estimate([[x] for _, x, _ in known], is_share=name == "success")))
            rows.append(row(f"{name} of B", estimate([[y] for _, _, y in known], is_share=name == "success")))
            label, mean, interval = row(f"{name}: B - A", estimate([[y - x] for _, x, y in known], is_share=False))
            rows.append((label, mean, "equal in each task" if len({y - x for _, x, y in known}) == 1 else interval))
        if name == "success":
            flipped = [(before[key][0], x, y) for key, x, y in known if x != y]
            flips = sorted(flipped, key=lambda one: one[0].index)
    yield from [f"{counted(len(common), 'task')}, paired", *table([("", "mean", "95 % interval"), *rows])]
    if a["attempts"] != b["attempts"]:
        yield "the numbers of attempts differ, so no flips are listed"
    elif not flips:
        yield "no task flipped"
    else:
        yield f"{counted(len(flips), 'task')} flipped (success of A -> B):"
        yield from (f"  {one.label}: {x:.0%} -> {y:.0%}" for one, x, y in flips[:_MAX_FLIPS])
        if len(flips) > _MAX_FLIPS:
            yield f"  and {len(flips) - _MAX_FLIPS} more"


def _read(folder: Path) -> tuple[dict[str, JSON], dict[str, list[EpisodeRecord]]]:
    """Return the result in a folder, and its finished episodes by the key of their task."""
    path = folder / EVALUATION
    try:
        found = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "is damaged"
        raise UsageError(f"{path}: {why}; name folders of finished evaluations (envkit eval --output)") from None
    if not isinstance(found, dict) or not {"env_id", "policy", "metrics"} <= found.keys():
        raise UsageError(f"{path}: is not a result of envkit eval; name folders of finished evaluations")
    if found.get("format") != FORMAT:
        raise UsageError(f"{path}: another version of envkit wrote it; evaluate again to compare")
    episodes: dict[str, list[EpisodeRecord]] = {}
    for episode in read_episodes(folder / EPISODES):
        if not episode.outcome.is_void:
            episodes.setdefault(Task(episode.env_id, episode.seed, episode.options).key, []).append(episode)
    return found, episodes


def _mean(episodes: list[EpisodeRecord], name: str) -> float:
    values = [one.outcome.success if name == "success" else one.outcome.reward for one in episodes]
    known = [float(value) for value in values if value is not None]
    return sum(known) / len(known) if known else math.nan


def _settings(result: Mapping[str, JSON]) -> dict[str, JSON]:
    settings, names = result["settings"], ("versions", "task_set", "success_rule")
    return {**cast("dict[str, JSON]", settings), **{name: result.get(name) for name in names}}


def differences(a: JSON, b: JSON) -> Iterator[tuple[str, str, str]]:
    """Yield the dotted keys of nested mappings whose values differ, with both values as JSON."""
    one, other = dict(leaves(a)), dict(leaves(b))
    for key in dict.fromkeys([*one, *other]):
        if one.get(key) != other.get(key):
            yield key, orjson.dumps(one.get(key)).decode(), orjson.dumps(other.get(key)).decode()
