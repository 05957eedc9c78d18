"""Durations of the parts of episodes, their quantiles for metrics, and timelines.

The parts of an episode are ``queue`` (until it has an environment), ``reset``, and for each turn ``wait`` (at the
gate), ``generate`` (the completion) and ``step`` (of the environment).

A timeline is a Chrome trace event file, which https://ui.perfetto.dev opens. Its process ``episodes`` has a track for
each slot, that is, for each episode that ran at the same time, and its process ``trainer`` the tracks update and push.
Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import gzip
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import orjson

from envkit.types import JSON, Trajectory

_QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
_EPISODES = 1
_TRAINER = 2
"""Process ids of the tracks."""

Event = Mapping[str, JSON]


class Span(NamedTuple):
    """A period of time, in seconds on the clock of `Trajectory.began_s`."""

    name: str
    began_s: float
    ended_s: float


def durations(attempts: Sequence[Trajectory]) -> dict[str, list[float]]:
    """Return the durations (s) of the parts of episodes by name, and of whole episodes as ``episode``."""
    found: dict[str, list[float]] = {name: [] for name in ("queue", "reset", "wait", "generate", "step", "episode")}
    for one in attempts:
        parts = _parts(one)
        for name, seconds in (*parts, ("episode", sum(seconds for _, seconds in parts))):
            found[name].append(seconds)
    return found


def quantile_metrics(durations: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the quantiles of durations as metrics, such as ``step_p90_s``; no metrics for a part without durations."""
    return {
        f"{part}_{name}_s": float(np.quantile(values, quantile))
        for part, values in durations.items()
        if values
        for name, quantile in _QUANTILES.items()
    }


def timeline(step: int, attempts: Sequence[Trajectory], work: Sequence[Span]) -> list[Event]:
    """Return the trace events of a train step. Times count from the first event, in microseconds.

    `attempts` are finished and void episodes. Each name in `work`, that of the trainer, is a track.
    """
    zero_s = min([*(one.began_s for one in attempts), *(span.began_s for span in work)], default=0.0)
    events: list[Event] = [_name("process_name", f"train step {step}: episodes", _EPISODES)]
    ended_s: list[float] = []  # of the last episode in each slot
    for one in sorted(attempts, key=lambda one: (one.began_s, one.key, one.attempt)):
        slot = next((slot for slot, at_s in enumerate(ended_s) if at_s <= one.began_s), len(ended_s))
        if slot == len(ended_s):
            ended_s.append(0.0)
            events.append(_name("thread_name", f"slot {slot}", _EPISODES, slot))
        about: dict[str, JSON] = {"session": one.session, "seed": one.task.seed, "stop": one.outcome.stop.value}
        if one.outcome.error is not None:
            about["error"] = one.outcome.error
        at_s = one.began_s
        for name, seconds in _parts(one):
            events.append(_complete(Span(name, at_s, at_s + seconds), zero_s, _EPISODES, slot, about))
            at_s += seconds
        ended_s[slot] = at_s
    tracks = list(dict.fromkeys(span.name for span in work))
    events.append(_name("process_name", f"train step {step}: trainer", _TRAINER))
    events += [_name("thread_name", name, _TRAINER, number) for number, name in enumerate(tracks)]
    events += [_complete(span, zero_s, _TRAINER, tracks.index(span.name), {}) for span in work]
    return events


def encoded_timeline(events: Sequence[Event]) -> bytes:
    """Return the content of a ``.json.gz`` file with the events."""
    return gzip.compress(orjson.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), compresslevel=6, mtime=0)


def _parts(trajectory: Trajectory) -> list[tuple[str, float]]:
    """Return the parts of an episode with their durations (s), one directly after the other."""
    parts = [("queue", trajectory.queue_s), ("reset", trajectory.reset_s)]
    for turn in trajectory.turns:
        parts += [("wait", turn.wait_s), ("generate", turn.generate_s), ("step", turn.step_s)]
    return parts


def _complete(span: Span, zero_s: float, process: int, track: int, about: dict[str, JSON]) -> Event:
    # Round both ends, so that a span never overlaps the next one.
    began_us, ended_us = (round((at_s - zero_s) * 1e6) for at_s in (span.began_s, span.ended_s))
    return {
        "name": span.name,
        "cat": "trainer" if process == _TRAINER else "episode",
        "ph": "X",
        "ts": began_us,
        "dur": ended_us - began_us,
        "pid": process,
        "tid": track,
        "args": about,
    }


def _name(kind: str, name: str, process: int, track: int = 0) -> Event:
    """Return the event that names a process or a track."""
    return {"name": kind, "ph": "M", "pid": process, "tid": track, "args": {"name": name}}
