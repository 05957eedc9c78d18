"""Rate limit of a tenant: a token bucket. It reads no clock: the caller passes the time."""

from __future__ import annotations

from typing import NamedTuple

_NOTHING = 1e-9
"""Tolerance in calls, so that a caller who waits for the reported time is not rejected because of a rounding error."""


class Rate(NamedTuple):
    """A rate limit: `per_s` calls per second on average, and at most `burst` calls at once. Both are above 0."""

    per_s: float
    burst: float


class Bucket:
    """A token bucket, which is full at the start.

    A batch larger than `burst` passes only if the bucket is full; otherwise it could never pass. The bucket then has a
    negative level, and later calls wait until it is refilled, so that the average rate is kept.

    Args:
        rate: Fill rate and size.
        now: Seconds of a monotonic clock, the same as in later calls.
    """

    __slots__ = ("_at", "_level", "_rate")

    def __init__(self, rate: Rate, now: float) -> None:
        if rate.per_s <= 0 or rate.burst <= 0:
            raise ValueError(f"a rate must be above 0, got {rate}")
        self._rate = rate
        self._level = rate.burst
        self._at = now

    def take(self, now: float, n: int = 1) -> float:
        """Take `n` calls and return 0.0, or take none and return the seconds to wait."""
        level = self._filled(now)
        least = min(n, self._rate.burst)
        if level < least - _NOTHING:
            return (least - level) / self._rate.per_s
        self._level = level - n
        return 0.0

    def charge(self, now: float, n: int = 1) -> float:
        """Take `n` calls that were already received, even if the bucket holds fewer; return the seconds until the next
        call is allowed.
        """
        self._level = self._filled(now) - n
        return max(0.0, -self._level / self._rate.per_s)

    def _filled(self, now: float) -> float:
        self._level = min(self._rate.burst, self._level + max(0.0, now - self._at) * self._rate.per_s)
        self._at = now
        return self._level
