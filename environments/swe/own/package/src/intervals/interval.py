"""An interval from a start, which belongs to it, to an end, which does not."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Interval:
    """The numbers from `start` up to, but without, `end`."""

    start: float
    end: float

    def __post_init__(self) -> None:
        if self.end < self.start:
            raise ValueError(f"an interval cannot end before it starts: {self.start} > {self.end}")

    @property
    def length(self) -> float:
        return self.end - self.start

    @property
    def is_empty(self) -> bool:
        return self.start == self.end

    def __contains__(self, value: float) -> bool:
        return self.start <= value < self.end

    def covers(self, other: Interval) -> bool:
        """Return whether all of `other` lies inside. Every interval covers an empty one."""
        return other.is_empty or (self.start <= other.start and other.end <= self.end)

    def overlaps(self, other: Interval) -> bool:
        """Return whether both have a number in common."""
        return max(self.start, other.start) < min(self.end, other.end)

    def touches(self, other: Interval) -> bool:
        """Return whether both together are one interval without a gap."""
        return max(self.start, other.start) <= min(self.end, other.end)

    def intersection(self, other: Interval) -> Interval | None:
        if not self.overlaps(other):
            return None
        return Interval(max(self.start, other.start), min(self.end, other.end))

    def gap(self, other: Interval) -> float:
        """Return the distance between both, 0 if they touch."""
        return max(0, max(self.start, other.start) - min(self.end, other.end))

    def shifted(self, by: float) -> Interval:
        return Interval(self.start + by, self.end + by)

    def widened(self, before: float, after: float | None = None) -> Interval:
        """Return the interval with margins; the one after the end is by default as wide as the one before the start."""
        after = before if after is None else after
        return Interval(self.start - before, self.end + after)

    def clamp(self, value: float) -> float:
        """Return the number from `start` to `end` that is closest to `value`."""
        if value < self.start:
            return self.start
        return self.end if value > self.end else value

    def pieces(self, size: float, *, keep_rest: bool = True) -> list[Interval]:
        """Return the interval cut into pieces of one size; a shorter rest is the last one, or is dropped."""
        if size <= 0:
            raise ValueError(f"size must be positive, got {size}")
        made = []
        start = self.start
        while start < self.end:
            end = start + size
            if end > self.end:
                if not keep_rest:
                    break
                end = self.end
            made.append(Interval(start, end))
            start = end
        return made
