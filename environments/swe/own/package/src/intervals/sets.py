"""Sets of numbers, as sorted intervals that do not touch."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator

from .interval import Interval


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Return sorted intervals that do not touch, with the same numbers. Empty intervals are dropped."""
    result: list[Interval] = []
    for one in sorted(intervals):
        if one.is_empty:
            continue
        if result and one.start <= result[-1].end:
            last = result.pop()
            one = Interval(last.start, max(last.end, one.end))
        result.append(one)
    return result


class IntervalSet:
    """An immutable set of numbers."""

    def __init__(self, intervals: Iterable[Interval] = ()) -> None:
        self._intervals = tuple(merged(intervals))

    @classmethod
    def of(cls, *pairs: tuple[float, float]) -> IntervalSet:
        return cls(Interval(start, end) for start, end in pairs)

    def __iter__(self) -> Iterator[Interval]:
        return iter(self._intervals)

    def __len__(self) -> int:
        return len(self._intervals)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, IntervalSet):
            return NotImplemented
        return self._intervals == other._intervals

    def __hash__(self) -> int:
        return hash(self._intervals)

    def __repr__(self) -> str:
        return f"IntervalSet({', '.join(f'[{one.start}, {one.end})' for one in self)})"

    def __contains__(self, value: float) -> bool:
        index = bisect_right(self._intervals, value, key=lambda one: one.start)
        return index > 0 and value in self._intervals[index - 1]

    @property
    def length(self) -> float:
        """The total length of all intervals."""
        return sum(one.length for one in self)

    @property
    def hull(self) -> Interval | None:
        """The smallest interval that covers the set; None for the empty set."""
        if not self._intervals:
            return None
        return Interval(self._intervals[0].start, self._intervals[-1].end)

    def __or__(self, other: IntervalSet) -> IntervalSet:
        return IntervalSet([*self, *other])

    def __and__(self, other: IntervalSet) -> IntervalSet:
        """Return the numbers in both sets, in one pass through both."""
        found = []
        mine, others = list(self), list(other)
        first = second = 0
        while first < len(mine) and second < len(others):
            common = mine[first].intersection(others[second])
            if common is not None:
                found.append(common)
            if mine[first].end < others[second].end:
                first += 1
            else:
                second += 1
        return IntervalSet(found)

    def __sub__(self, other: IntervalSet) -> IntervalSet:
        """Return the numbers of this set that are not in the other one."""
        left = []
        for one in self:
            start = one.start
            for cut in other:
                if not cut.overlaps(one):
                    continue
                if cut.start > start:
                    left.append(Interval(start, cut.start))
                start = max(start, cut.end)
            if start < one.end:
                left.append(Interval(start, one.end))
        return IntervalSet(left)

    def __xor__(self, other: IntervalSet) -> IntervalSet:
        return (self | other) - (self & other)

    def complement(self, within: Interval) -> IntervalSet:
        """Return the numbers of an interval that are not in the set."""
        return IntervalSet([within]) - self

    def gaps(self, at_least: float = 0) -> list[Interval]:
        """Return the gaps between the intervals that have a minimum length."""
        pairs = zip(self._intervals, self._intervals[1:])
        between = [Interval(before.end, after.start) for before, after in pairs]
        return [one for one in between if one.length >= at_least]

    def closed_gaps(self, up_to: float) -> IntervalSet:
        """Return the set without its gaps up to a length."""
        return IntervalSet([*self, *(gap for gap in self.gaps() if gap.length <= up_to)])

    def longest(self) -> Interval | None:
        """Return the longest interval, the first of equal ones; None for the empty set."""
        return max(self._intervals, key=lambda one: (one.length, -one.start), default=None)
