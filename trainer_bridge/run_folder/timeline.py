"""Timelines of train steps, as Chrome trace event files, which https://ui.perfetto.dev opens.

The process ``episodes`` has a track for each slot, that is, for each episode that ran at the same time. The spans of an
episode are queue, reset, and for each turn wait, generate and step. The process ``trainer`` has the tracks update and
push. Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import gzip
import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import orjson

from envkit.types import JSON, Trajectory

_EPISODES = 1
_TRAINER = 2
"""Process ids of the tracks."""

Event = Mapping[str, JSON]


@dataclass(frozen=True, slots=True)
class Span:
    """A period of time.

    Attributes:
        name: What happened.
        began_s: Its start in seconds, on the clock of `Trajectory.began_s`.
        ended_s: Its end.
    """

    name: str
    began_s: float
    ended_s: float


def timeline(step: int, attempts: Sequence[Trajectory], work: Sequence[Span]) -> list[Event]:
    """Return the trace events of a train step. Times count from the first event, in microseconds.

    Args:
        step: Number of the train step.
        attempts: Its episodes, finished and void.
        work: Work of the trainer; each name is a track.
    """
    zero_s = min([*(one.began_s for one in attempts), *(span.began_s for span in work)], default=0.0)
    episodes = sorted(attempts, key=lambda one: (one.began_s, one.key, one.attempt))
    spans = [_spans(one) for one in episodes]
    slots = _slots([(some[0].began_s, some[-1].ended_s) for some in spans])
    tracks = list(dict.fromkeys(span.name for span in work))
    events: list[Event] = [_name("process_name", f"train step {step}: episodes", _EPISODES)]
    events += [_name("thread_name", f"slot {slot}", _EPISODES, slot) for slot in range(max(slots, default=-1) + 1)]
    for one, some, slot in zip(episodes, spans, slots, strict=True):
        for span in some:
            about: dict[str, JSON] = {"session": one.session, "seed": one.task.seed, "stop": one.outcome.stop.value}
            events.append(_complete(span, zero_s, _EPISODES, slot, about))
    events.append(_name("process_name", f"train step {step}: trainer", _TRAINER))
    events += [_name("thread_name", name, _TRAINER, number) for number, name in enumerate(tracks)]
    events += [_complete(span, zero_s, _TRAINER, tracks.index(span.name), {}) for span in work]
    return events


def encoded_timeline(events: Sequence[Event]) -> bytes:
    """Return the content of a ``.json.gz`` file with the events."""
    return gzip.compress(orjson.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), compresslevel=6, mtime=0)


def _spans(trajectory: Trajectory) -> list[Span]:
    """Return the spans of an episode, one directly after the other. There is at least the span ``queue``."""

    def parts() -> Iterator[tuple[str, float]]:
        yield "queue", trajectory.queue_s
        if trajectory.start is not None:
            yield "reset", trajectory.reset_s
        for turn in trajectory.turns:
            yield "wait", turn.wait_s
            yield "generate", turn.generate_s
            if turn.step is not None:
                yield "step", turn.step_s

    spans: list[Span] = []
    at_s = trajectory.began_s
    for name, duration_s in parts():
        spans.append(Span(name, at_s, at_s + duration_s))
        at_s += duration_s
    return spans


def _slots(periods: Sequence[tuple[float, float]]) -> list[int]:
    """Return a slot for each period, so that those in the same slot do not overlap. Periods are sorted by their start.

    A period gets the slot with the lowest number that is free.
    """
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    chosen: list[int] = []
    for began_s, ended_s in periods:
        while busy and busy[0][0] <= began_s:
            heapq.heappush(free, heapq.heappop(busy)[1])
        slot = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (ended_s, slot))
        chosen.append(slot)
    return chosen


def _complete(span: Span, zero_s: float, process: int, track: int, about: Mapping[str, JSON]) -> Event:
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
        "args": dict(about),
    }


def _name(kind: str, name: str, process: int, track: int = 0) -> Event:
    """Return the event that names a process or a track."""
    return {"name": kind, "ph": "M", "pid": process, "tid": track, "args": {"name": name}}
