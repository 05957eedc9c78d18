"""For how long clients may keep a server waiting, and how slow they may be."""

from __future__ import annotations

BODY_S = 30.0
"""Seconds in which a body, or a message of a socket, has to come at `BYTES_PER_S`, again and again."""

HELD_S = 600.0
"""Seconds that a body, or a message, may take as a whole that is held in memory until it is complete, roughly."""

ANSWER_S = 120.0
"""Seconds in which a client may read nothing; one that trains in the loop's own thread is deaf for a while."""

BYTES_PER_S = 16 << 10
"""What the slowest clients send and read."""


class SlowClientTimer:
    """For how long a client has kept the server waiting for the same thing, at a look each."""

    __slots__ = ("_about", "_done", "_since")

    def __init__(self) -> None:
        self._about: object = None
        self._since = 0.0
        self._done = 0

    def is_over(self, about: object, done: int, now: float, bound_s: float) -> bool:
        """Say whether it has lasted for too long.

        Args:
            about: What is waited for.
            done: Bytes of it so far, as seen from anywhere.
            now: Seconds of the loop's clock.
            bound_s: Seconds that it may last beyond what those bytes take.
        """
        if about != self._about:
            self._about, self._since, self._done = about, now, done
            return False
        return now - self._since > bound_s + (done - self._done) / BYTES_PER_S

    def is_too_slow(self, about: object, done: int, now: float, rate: float) -> bool:
        """Say whether less than `rate` bytes a second of it came for `BODY_S`, as seen at looks; see `is_over`."""
        if about == self._about:
            if now - self._since < BODY_S:
                return False
            if done - self._done < rate * (now - self._since):
                return True
        self._about, self._since, self._done = about, now, done
        return False

    def end(self) -> None:
        self._about = None


def least_rate(size: int) -> float:
    """Return how many bytes a second the slowest clients send of a body that is held while it has `size` bytes."""
    return max(BYTES_PER_S, size / HELD_S)
