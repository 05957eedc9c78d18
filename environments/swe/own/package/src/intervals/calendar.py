"""Free slots of people with meetings. Times are minutes since midnight of the first day."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from .formats import parse_span
from .interval import Interval
from .sets import IntervalSet

DAY = 1440


def busy_from_meetings(meetings: Iterable[str], *, margin: int = 0) -> IntervalSet:
    """Return the busy times of meetings such as ``9:00-10:30``, with a margin before and after each."""
    spans = (parse_span(one).widened(margin) for one in meetings)
    return IntervalSet(Interval(max(0, one.start), one.end) for one in spans if one.length > 0)


def free_slots(busy: IntervalSet, hours: Interval, *, at_least: float = 1) -> list[Interval]:
    """Return the times within working hours that are not busy and have a minimum length."""
    return [one for one in busy.complement(hours) if one.length >= at_least]


def common_slots(calendars: Mapping[str, IntervalSet], hours: Interval, *, at_least: float = 1) -> list[Interval]:
    """Return the free slots that all people have in common."""
    everything = IntervalSet()
    for busy in calendars.values():
        everything = everything | busy
    return free_slots(everything, hours, at_least=at_least)


def first_slot(
    calendars: Mapping[str, IntervalSet], hours: Interval, duration: int, *, step: int = 15, after: float = 0
) -> Interval | None:
    """Return the first slot of a duration for all people that starts at a multiple of `step` minutes.

    Args:
        calendars: Busy times by the name of the person.
        hours: Working hours.
        duration: Minutes of the slot.
        step: The slot starts at a multiple of this number of minutes.
        after: The slot does not start before this time.
    """
    for free in common_slots(calendars, hours, at_least=duration):
        start = max(free.start, after)
        start = -(-start // step) * step
        if start + duration <= free.end:
            return Interval(start, start + duration)
    return None


def split_by_day(span: Interval) -> list[tuple[int, Interval]]:
    """Return the parts of a span as pairs of the day, from 0, and the times of that day."""
    parts = []
    day = int(span.start // DAY)
    while day * DAY < span.end:
        today = Interval(day * DAY, (day + 1) * DAY)
        part = span.intersection(today)
        if part is not None:
            parts.append((day, part.shifted(-day * DAY)))
        day += 1
    return parts


def load_by_day(meetings: Sequence[Interval], days: int) -> list[float]:
    """Return the share of each day that meetings take; overlapping meetings count once."""
    used = [0.0] * days
    for span in IntervalSet(meetings):
        for day, part in split_by_day(span):
            if day < days:
                used[day] += part.length
    return [round(one / DAY, 4) for one in used]


def busiest_day(meetings: Sequence[Interval], days: int) -> int | None:
    """Return the day with the most meeting time, the first of equal ones; None without any."""
    load = load_by_day(meetings, days)
    best = max(load, default=0)
    return load.index(best) if best > 0 else None
