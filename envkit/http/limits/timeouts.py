"""Timeouts and minimum rates for slow clients."""

from __future__ import annotations

BODY_S = 30.0
"""Length in seconds of the window over which the rate of a body or a socket message must be at least `BYTES_PER_S`."""

HELD_S = 600.0
"""Approximate maximum duration, seconds, of a body or message that is buffered in memory."""

ANSWER_S = 120.0
"""Seconds that a client may pause reading; a client that trains a model in its event loop's thread pauses for long."""

BYTES_PER_S = 16 << 10
"""Minimum rate at which clients must send and read."""


class SlowClientTimer:
    """Measures at periodic checks how long the server has been waiting for the same action of a client."""

    __slots__ = ("_about", "_done", "_since")

    def __init__(self) -> None:
        self._about: object = None
        self._since = 0.0
        self._done = 0

    def is_over(self, about: object, done: int, now: float, bound_s: float) -> bool:
        """Return whether the wait exceeds its timeout.

        Args:
            about: The action that the server waits for.
            done: Bytes transferred so far; only differences count.
            now: Loop time, seconds.
            bound_s: Timeout, seconds, in addition to the time that the bytes take at `BYTES_PER_S`.
        """
        if about != self._about:
            self._about, self._since, self._done = about, now, done
            return False
        return now - self._since > bound_s + (done - self._done) / BYTES_PER_S

    def is_too_slow(self, about: object, done: int, now: float, rate: float) -> bool:
        """Return whether less than `rate` bytes/s arrived during the last `BODY_S`; see `is_over`."""
        if about == self._about:
            if now - self._since < BODY_S:
                return False
            if done - self._done < rate * (now - self._since):
                return True
        self._about, self._since, self._done = about, now, done
        return False

    def end(self) -> None:
        self._about = None


def min_rate(size: int) -> float:
    """Return the minimum rate, bytes/s, for a buffered body of `size` bytes."""
    return max(BYTES_PER_S, size / HELD_S)
