"""Half-open intervals, sets of intervals, and the free slots of calendars."""

from .calendar import busy_from_meetings, common_slots, first_slot, free_slots, split_by_day
from .formats import format_duration, format_minutes, format_set, parse_duration, parse_set, parse_span
from .interval import Interval
from .sets import IntervalSet

__all__ = [
    "Interval",
    "IntervalSet",
    "busy_from_meetings",
    "common_slots",
    "first_slot",
    "format_duration",
    "format_minutes",
    "format_set",
    "free_slots",
    "parse_duration",
    "parse_set",
    "parse_span",
    "split_by_day",
]
