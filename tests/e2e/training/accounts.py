"""The accounts of an asynchronous run, from the files of its folder: what became of groups, attempts and tokens."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from envkit.trainer_bridge.scheduler.accounting import Fate, Stage

Row = Mapping[str, Any]


def rows(path: Path) -> list[Row]:
    """Return the rows of a file, without an incomplete last one; none if there is no file."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def accounts(folder: Path, *, steps: int, groups: int, size: int, retries: int = 3) -> dict[str, Any]:
    """Return what became of the groups, attempts and tokens of a run that has ended.

    The run has neither filters nor extra members, and records the timeline of each train step. Accounts of a train step
    add up if all attempts (and tokens) that were asked for (sampled) so far have a fate or are in progress.

    Args:
        folder: Folder of the run.
        steps: Number of its train steps.
        groups: Groups of a train step.
        size: Episodes of a group.
        retries: Maximum number of times that a void episode is played again.

    Returns:
        Figures, and under ``problems`` what does not add up.
    """
    metrics, schedule = rows(folder / "metrics.jsonl"), rows(folder / "schedule.jsonl")
    summary = json.loads((folder / "summary.json").read_text())
    trained = {number: members for row in schedule for number, _, _, members in row["groups"]}
    numbers = [group[0] for row in schedule for group in row["groups"]]
    void = void_attempts(folder)
    failures = Counter(session.rpartition(".")[0] for session in void)
    lost = sorted({*range(max(numbers, default=0) + 1)} - {*numbers})
    totals: Counter[str] = Counter()
    problems = [line for row in metrics for line in imbalances(row, totals)]
    problems += [f"finding: {one}" for one in summary["diagnosis"] if one["name"] == "samples_lost_or_repeated"]
    for name, found in (("metrics", metrics), ("schedule", schedule)):
        if [row["step"] for row in found] != [*range(1, steps + 1)]:
            problems.append(f"{name}.jsonl has the train steps {[row['step'] for row in found]}")
    problems += [f"group {number} was trained on {count} times" for number, count in repeated(numbers)]
    if len(numbers) != steps * groups:
        problems.append(f"{len(numbers)} groups were trained on, of {steps * groups}")
    for number in numbers:
        missing = {*range(size)} - {*trained[number]}
        if len(trained[number]) < 2 or any(failures[key(number, one)] <= retries for one in missing):
            problems.append(f"group {number} was trained on with the members {trained[number]}")
    for number in lost:
        if sum(failures[key(number, one)] > retries for one in range(size)) < size - 1:
            problems.append(f"group {number} was not trained on, and not void")
    if totals["trained"] + totals["dropped"] != sum(map(len, trained.values())):
        problems.append(f"{totals['trained']} episodes were trained on, and the schedule has other members")
    if not len(void) <= totals["voided"] <= len(void) + len(lost):  # a void group may have a valid episode
        problems.append(f"{totals['voided']} attempts are void, and {len(void)} of them have a cause")
    expected = {name: count for name, count in summary["accounting"].items() if count}
    if expected != {name: count for name, count in totals.items() if count}:
        problems.append(f"the train steps add up to {dict(totals)}, and the summary has {expected}")
    return {
        "problems": problems,
        "train_steps": len(metrics),
        "groups_trained": len({*numbers}),
        "groups_void": len(lost),
        "groups_by_size": dict(sorted(Counter(str(len(members)) for members in trained.values()).items())),
        "attempts": {name: count for name, count in totals.items() if count and not name.startswith("tokens_")},
        "tokens": {name: count for name, count in totals.items() if count and name.startswith("tokens_")},
        "void_by_cause": dict(Counter(void.values())),
        "lag_max": max((row.get("lag_max", 0) for row in metrics), default=0),
        "lag_mean": round(sum(row.get("lag_mean", 0) for row in metrics) / max(len(metrics), 1), 2),
    }


def imbalances(row: Row, totals: Counter[str]) -> Iterator[str]:
    """Add what a train step has counted to the totals, and yield which of them do not add up after it."""
    for prefix, total in (("", "asked"), ("tokens_", "tokens_sampled")):
        fates = (
            [f"{prefix}{fate}" for fate in Fate] if not prefix else ["tokens_masked", *map("tokens_{}".format, Fate)]
        )
        stages = [f"{prefix}{stage}" for stage in Stage]
        for name in (total, *fates):
            totals[name] += round(row.get(name if prefix else f"episodes_{name}", 0))
        for name in stages:
            totals[name] = round(row.get(name if prefix else f"episodes_{name}", 0))
        if totals[total] != sum(totals[name] for name in (*fates, *stages)):
            yield f"after train step {row['step']}: {dict(totals)}"


def void_attempts(folder: Path) -> dict[str, str]:
    """Return why each attempt failed whose infrastructure did, by its session, from the timelines of the run."""
    found = {}
    for path in folder.glob("timeline/step-*.json.gz"):
        for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]:
            about = event["args"]
            if "error" in about and about["stop"] not in ("aborted", "stale"):
                found[about["session"]] = f"{about['stop']}: {about['error']}"
    return found


def repeated(numbers: list[int]) -> list[tuple[int, int]]:
    return [(number, count) for number, count in Counter(numbers).items() if count > 1]


def key(number: int, member: int) -> str:
    """Return the key of an episode."""
    return f"train/{number:08d}/{member:04d}"
