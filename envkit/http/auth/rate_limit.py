"""Rates: how many calls a tenant may make, as a bucket that fills with time. Pure; the caller brings the clock."""

from __future__ import annotations

from typing import NamedTuple

_NOTHING = 1e-9
"""Of a call; whoever waits as long as it was told must not fail for the last bit of a float."""


class Rate(NamedTuple):
    """`per_s` calls a second on average, of which `burst` may come at once. Both are above 0."""

    per_s: float
    burst: float


class Bucket:
    """A token bucket, full at first. It lends: what is larger than a burst passes when the bucket is full.

    Without that a batch of more steps than a burst could never pass; the debt is waited for afterwards, so that the
    average holds.

    Args:
        rate: How fast it fills, and how much it holds.
        now: Seconds of any steady clock, the same as in later calls.
    """

    __slots__ = ("_at", "_level", "_rate")

    def __init__(self, rate: Rate, now: float) -> None:
        if rate.per_s <= 0 or rate.burst <= 0:
            raise ValueError(f"a rate must be above 0, got {rate}")
        self._rate = rate
        self._level = rate.burst
        self._at = now

    def take(self, now: float, n: int = 1) -> float:
        """Take `n` calls if they may come now; return 0.0, or else the seconds to wait, having taken nothing."""
        level = self._filled(now)
        least = min(n, self._rate.burst)
        if level < least - _NOTHING:
            return (least - level) / self._rate.per_s
        self._level = level - n
        return 0.0

    def charge(self, now: float, n: int = 1) -> float:
        """Take `n` calls, which have come already; return the seconds until the next may come."""
        self._level = self._filled(now) - n
        return max(0.0, -self._level / self._rate.per_s)

    def _filled(self, now: float) -> float:
        self._level = min(self._rate.burst, self._level + max(0.0, now - self._at) * self._rate.per_s)
        self._at = now
        return self._level
