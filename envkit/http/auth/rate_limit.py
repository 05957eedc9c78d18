"""Rate limit of a tenant, as a token bucket. The caller passes the current time to each method."""

from __future__ import annotations

from typing import NamedTuple

_NOTHING = 1e-9
"""Tolerance in calls, so that a caller who waits for the reported time is not rejected because of a rounding error."""


class Rate(NamedTuple):
    """A rate limit: `per_s` calls per second on average, and up to `burst` calls at a time. Both are above 0."""

    per_s: float
    burst: float


class Bucket:
    """A token bucket that limits the rate of calls. The bucket is full at the start.

    If the bucket is full, even a batch of more than `burst` calls is allowed; otherwise it could never run. Such a
    batch makes the level of the bucket negative, and later calls wait until the bucket has filled up enough for them.
    The average rate therefore stays within the limit.

    Args:
        rate: Rate at which the bucket fills, and its size.
        now: Current time of a monotonic clock, in seconds. Pass the time of the same clock to the methods.
    """

    __slots__ = ("_at", "_level", "_rate")

    def __init__(self, rate: Rate, now: float) -> None:
        if rate.per_s <= 0 or rate.burst <= 0:
            raise ValueError(f"per_s and burst must be above 0, got {rate}")
        self._rate = rate
        self._level = rate.burst
        self._at = now

    def take(self, now: float, n: int = 1) -> float:
        """Allow `n` calls and return 0.0; or allow none of them and return the seconds to wait before a retry."""
        level = self._filled(now)
        least = min(n, self._rate.burst)
        if level < least - _NOTHING:
            return (least - level) / self._rate.per_s
        self._level = level - n
        return 0.0

    def charge(self, now: float, n: int = 1) -> float:
        """Count `n` calls that were already received; return the seconds until the next call is allowed."""
        self._level = self._filled(now) - n
        return max(0.0, -self._level / self._rate.per_s)

    def _filled(self, now: float) -> float:
        self._level = min(self._rate.burst, self._level + max(0.0, now - self._at) * self._rate.per_s)
        self._at = now
        return self._level
