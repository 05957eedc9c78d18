"""Timelines and durations of a train step."""

from __future__ import annotations

import gzip
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import orjson
import pytest

from envkit.trainer_bridge.run_folder.timeline import (
    Span,
    durations,
    encoded_timeline,
    quantile_metrics,
    timeline,
)
from envkit.types import (
    Completion,
    FinishReason,
    Observation,
    Outcome,
    Reset,
    Step,
    StopReason,
    Task,
    Trajectory,
    Turn,
    floats,
    ints,
)
from tests.trainer_bridge.loop_parts import SETTINGS, Part

START = Reset(Observation("s"), {})


def turn(*, wait_s: float, generate_s: float, step_s: float | None) -> Turn:
    completion = Completion(ints([5]), floats([-0.5]), FinishReason.LENGTH, ((0, 1),))
    step = None if step_s is None else Step(Observation("t"), 0.0, False, False, {})
    return Turn(ints([1]), completion, "a", step, generate_s, step_s or 0.0, wait_s)


def episode(key: str, began_s: float, *turns: Turn, queue_s: float = 0.0, reset_s: float = 0.0) -> Trajectory:
    return Trajectory(
        Task("Scripted-v0", 3), 0, turns, Outcome.score(StopReason.TERMINATED, 0.0, {}), start=START,
        key=key, began_s=began_s, queue_s=queue_s, reset_s=reset_s,
    )  # fmt: skip


TWO = [
    episode("a", 10.0, turn(wait_s=0.5, generate_s=1.0, step_s=0.25), queue_s=1.0, reset_s=0.25),
    episode("b", 10.5, turn(wait_s=0.0, generate_s=1.5, step_s=None)),
    episode("c", 12.0, turn(wait_s=0.0, generate_s=1.0, step_s=0.5)),
]
WORK = [Span("update", 14.0, 15.0), Span("push", 15.0, 15.25)]


def spans(events: Any) -> dict[tuple[int, int], list[tuple[str, int, int]]]:
    """The spans of each track: name, start and end (us)."""
    found = defaultdict(list)
    for one in events:
        if one["ph"] == "X":
            found[one["pid"], one["tid"]].append((one["name"], one["ts"], one["ts"] + one["dur"]))
    return dict(found)


def check_format(content: bytes) -> Any:
    """Check a file against the JSON object format of Chrome trace events, and return its events."""
    file = orjson.loads(gzip.decompress(content))
    assert file["displayTimeUnit"] in ("ms", "ns")
    for one in file["traceEvents"]:
        assert (type(one["name"]), type(one["pid"]), type(one["tid"])) == (str, int, int)
        if one["ph"] == "M":
            assert one["name"] in ("process_name", "thread_name")
        else:
            assert one["ph"] == "X"
            assert min(one["ts"], one["dur"]) >= 0
            assert (type(one["cat"]), type(one["args"])) == (str, dict)
    named = {(one["pid"], one["tid"]) for one in file["traceEvents"] if one["name"] == "thread_name"}
    for track, some in spans(file["traceEvents"]).items():
        assert track in named
        ordered = sorted(some, key=lambda one: one[1:])
        for (_, _, ended), (_, began, _) in pairwise(ordered):
            assert ended <= began, "spans of a track must not overlap"
    return file["traceEvents"]


def test_a_timeline_has_a_track_for_each_slot_and_for_the_work_of_the_trainer() -> None:
    events = check_format(encoded_timeline(timeline(7, TWO, WORK)))
    ms = 1000
    assert spans(events) == {
        # c begins when b, which had the second slot, is over.
        (1, 0): [
            ("queue", 0, 1000 * ms),
            ("reset", 1000 * ms, 1250 * ms),
            ("wait", 1250 * ms, 1750 * ms),
            ("generate", 1750 * ms, 2750 * ms),
            ("step", 2750 * ms, 3000 * ms),
        ],
        (1, 1): [
            *[(name, 500 * ms, 500 * ms) for name in ("queue", "reset", "wait")],
            ("generate", 500 * ms, 2000 * ms),
            *[(name, 2000 * ms, 2000 * ms) for name in ("step", "queue", "reset", "wait")],
            ("generate", 2000 * ms, 3000 * ms),
            ("step", 3000 * ms, 3500 * ms),
        ],
        (2, 0): [("update", 4000 * ms, 5000 * ms)],
        (2, 1): [("push", 5000 * ms, 5250 * ms)],
    }
    names = [one["args"]["name"] for one in events if one["ph"] == "M"]
    assert names == ["train step 7: episodes", "slot 0", "slot 1", "train step 7: trainer", "update", "push"]
    assert events[2]["args"] == {"session": "a.0", "seed": 3, "stop": "terminated"}


def test_a_timeline_says_why_an_episode_is_void() -> None:
    void = replace(TWO[0], outcome=Outcome.void(StopReason.SANDBOX_LOST, "sandbox lost: out of memory"))
    assert timeline(7, [void], [])[2]["args"] == {
        "session": "a.0", "seed": 3, "stop": "sandbox_lost", "error": "sandbox lost: out of memory"
    }  # fmt: skip


# --- Durations -------------------------------------------------------------------------------------------------------


def test_durations_are_those_of_turns_and_episodes() -> None:
    assert durations(TWO) == {
        "queue": [1.0, 0.0, 0.0],
        "reset": [0.25, 0.0, 0.0],
        "wait": [0.5, 0.0, 0.0],
        "generate": [1.0, 1.5, 1.0],
        "step": [0.25, 0.0, 0.5],
        "episode": [3.0, 1.5, 1.5],
    }


def test_metrics_are_quantiles_and_their_names_end_in_seconds() -> None:
    metrics = quantile_metrics({"step": [float(n) for n in range(101)], "wait": []})
    assert metrics == pytest.approx({"step_p50_s": 50, "step_p90_s": 90, "step_p99_s": 99, "step_max_s": 100})


# --- In a run --------------------------------------------------------------------------------------------------------


def test_a_run_records_timelines_of_the_recorded_steps(tmp_path: Path) -> None:
    part = Part(tmp_path, replace(SETTINGS, steps=3, trajectories_every=3), eval_tasks=0).run()
    assert list(part.notes.timelines) == [1, 3]
    tracks = spans(part.notes.timelines[3])
    assert {process for process, _ in tracks} == {1, 2}
    assert [some[0][0] for (process, _), some in tracks.items() if process == 2] == ["update", "push"]
