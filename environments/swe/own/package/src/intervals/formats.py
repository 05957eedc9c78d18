"""Text forms of intervals, sets and durations. Times of day are minutes since midnight."""

from __future__ import annotations

import re

from .interval import Interval
from .sets import IntervalSet

_PAIR = re.compile(r"\[\s*(-?\d+(?:\.\d+)?)\s*,\s*(-?\d+(?:\.\d+)?)\s*\)")
_TIME = re.compile(r"(\d{1,2})(?::(\d{2}))?\s*(am|pm)?", re.IGNORECASE)
_PART = re.compile(r"(\d+)\s*(d|h|min|m)")
_UNITS = {"d": 1440, "h": 60, "min": 1, "m": 1}


def parse_set(text: str) -> IntervalSet:
    """Return the set of a text such as ``[1, 5) [8, 9.5)``.

    Raises:
        ValueError: The text contains something else.
    """
    rest = _PAIR.sub("", text).strip()
    if rest:
        raise ValueError(f"not an interval: {rest!r}")
    return IntervalSet(Interval(_number(start), _number(end)) for start, end in _PAIR.findall(text))


def format_set(numbers: IntervalSet) -> str:
    """Return the text that `parse_set` reads."""
    return " ".join(f"[{one.start:g}, {one.end:g})" for one in numbers)


def _number(text: str) -> float:
    return float(text) if "." in text else int(text)


def parse_time(text: str) -> int:
    """Return the minutes since midnight of a time such as ``9:30``, ``14`` or ``2:15 pm``.

    ``24:00`` is the end of a day.
    """
    match = _TIME.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"not a time: {text!r}")
    hour, minute, half = int(match[1]), int(match[2] or 0), (match[3] or "").lower()
    if half:
        if not 1 <= hour <= 12:
            raise ValueError(f"not an hour of a 12-hour clock: {text!r}")
        hour = hour % 12 + (12 if half == "pm" else 0)
    total = hour * 60 + minute
    if minute > 59 or total > 1440:
        raise ValueError(f"not a time: {text!r}")
    return total


def parse_span(text: str) -> Interval:
    """Return the interval of a text such as ``9:00-17:30``. A span that ends before it starts ends on the next day."""
    start, separator, end = text.partition("-")
    if not separator:
        raise ValueError(f"not a span of time: {text!r}")
    first, last = parse_time(start), parse_time(end)
    if last < first:
        last += 1440
    return Interval(first, last)


def format_minutes(minutes: int) -> str:
    """Return a time of day, such as ``09:05``; times after the first day have a suffix such as ``+1``."""
    day, rest = divmod(minutes, 1440)
    if rest == 0 and day > 0:
        day, rest = day - 1, 1440
    suffix = f"+{day}" if day else ""
    return f"{rest // 60:02d}:{rest % 60:02d}{suffix}"


def parse_duration(text: str) -> int:
    """Return the minutes of a duration such as ``1h 30min``."""
    parts = _PART.findall(text)
    if not parts or _PART.sub("", text).strip():
        raise ValueError(f"not a duration: {text!r}")
    return sum(int(count) * _UNITS[unit] for count, unit in parts)


def format_duration(minutes: int) -> str:
    """Return a duration in days, hours and minutes, without those that are zero."""
    if minutes < 0:
        return f"-{format_duration(-minutes)}"
    parts = []
    for unit in ("d", "h", "min"):
        count, minutes = divmod(minutes, _UNITS[unit])
        if count:
            parts.append(f"{count}{unit}")
    return " ".join(parts) or "0min"
