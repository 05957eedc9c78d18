"""Comparison of two evaluations: settings that differ, the paired difference, and the tasks that flipped."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import cast

import orjson

from envkit.errors import UsageError
from envkit.runs.episodes import EPISODES, read_episodes
from envkit.types import JSON, EpisodeRecord, Task

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
        UsageError: A folder has no finished evaluation of this format, or the two have no task in common.
    """
    a, b = _result(one), _result(other)
    yield f"A: {one} ({a['policy']} on {a['env_id']}), B: {other} ({b['policy']} on {b['env_id']})"
    changed = [
        f"  {key}: {_text(old)} -> {_text(new)}"
        for key, old, new in _differences(flat(_settings(a)), flat(_settings(b)))
    ]
    yield from ["settings that differ (A -> B):", *changed] if changed else ["the settings are equal"]
    before, after = _by_task(one), _by_task(other)
    common = sorted(before.keys() & after.keys())
    if not common:
        raise UsageError(f"{one} and {other} have no task in common; evaluate with the same seed, split and options")
    if a["task_set"] != b["task_set"]:
        left = len(before.keys() ^ after.keys())
        yield f"the task sets differ: {len(common)} tasks are in both, {left} only in one of them, which do not count"
    rows, flips = [], []
    for name in ("success", "return"):
        pairs = [(key, _mean(before[key], name), _mean(after[key], name)) for key in common]
        known = [(key, x, y) for key, x, y in pairs if not math.isnan(x + y)]
        if known:
            rows.append(row(f"{name} of A", estimate([[x] for _, x, _ in known], is_share=name == "success")))
            rows.append(row(f"{name} of B", estimate([[y] for _, _, y in known], is_share=name == "success")))
            rows.append(row(f"{name}: B - A", estimate([[y - x] for _, x, y in known], is_share=False)))
        if name == "success":
            flipped = [(before[key][0], x, y) for key, x, y in known if x != y]
            flips = sorted(flipped, key=lambda one: one[0].index)
    yield f"{len(common)} tasks, paired"
    yield from table([("", "mean", "95 % interval"), *rows])
    if flips:
        yield f"{len(flips)} tasks flipped (success of A -> B):"
        for episode, x, y in flips[:_MAX_FLIPS]:
            yield f"  task {episode.index} (seed {episode.seed}): {x:.0%} -> {y:.0%}"
        if len(flips) > _MAX_FLIPS:
            yield f"  and {len(flips) - _MAX_FLIPS} more"
    else:
        yield "no task flipped"


def _result(folder: Path) -> dict[str, JSON]:
    path = folder / EVALUATION if folder.is_dir() else folder
    try:
        found = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "is damaged"
        raise UsageError(f"{path}: {why}; name folders of finished evaluations (envkit eval --output)") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise UsageError(f"{path}: an earlier version of envkit wrote it; evaluate again to compare")
    return found


def _by_task(folder: Path) -> dict[str, list[EpisodeRecord]]:
    """Return the finished episodes by the key of their task."""
    found: dict[str, list[EpisodeRecord]] = {}
    for episode in read_episodes((folder if folder.is_dir() else folder.parent) / EPISODES):
        if not episode.outcome.is_void:
            key = Task(episode.env_id, episode.seed, episode.options).key
            found.setdefault(key, []).append(episode)
    return found


def _mean(episodes: list[EpisodeRecord], name: str) -> float:
    values = [one.outcome.success if name == "success" else one.outcome.reward for one in episodes]
    known = [float(value) for value in values if value is not None]
    return sum(known) / len(known) if known else math.nan


def _settings(result: Mapping[str, JSON]) -> dict[str, JSON]:
    settings, names = result["settings"], ("versions", "task_set", "success_rule")
    return {**cast("dict[str, JSON]", settings), **{name: result.get(name) for name in names}}


def flat(value: JSON, key: str = "") -> dict[str, JSON]:
    """Return the values of nested mappings by their dotted keys."""
    if not isinstance(value, Mapping) or not value:
        return {key: value}
    return {
        name: one
        for inner, content in value.items()
        for name, one in flat(content, f"{key}.{inner}" if key else str(inner)).items()
    }


def _differences(a: Mapping[str, JSON], b: Mapping[str, JSON]) -> Iterator[tuple[str, JSON, JSON]]:
    for key in dict.fromkeys([*a, *b]):
        if a.get(key) != b.get(key):
            yield key, a.get(key), b.get(key)


def _text(value: JSON) -> str:
    return orjson.dumps(value).decode()
