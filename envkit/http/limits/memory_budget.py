"""Memory budget: limits the bytes of large request bodies and replies that a server has in memory at once.

A request whose body or expected answer is larger than `UNCOUNTED_BYTES` reserves memory before its call begins,
because the call may not be safe to repeat. If there is not enough memory, the request waits up to `WAIT_S` seconds and
then fails with an error, so the caller can repeat it. After the call, the actual size of the answer is counted. Smaller
requests are not counted; the limit on concurrent requests limits them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import anyio

from envkit.errors import CapacityError

UNCOUNTED_BYTES = 1 << 20
"""Size in bytes up to which a body or reply is not counted."""

WAIT_S = 10.0
"""Seconds that a request waits for memory; clients wait longer than that for a reply."""


class MemoryBudget:
    """The memory budget of one server.

    Args:
        max_bytes: Limit of all requests together. A single request may exceed it when it is alone.
    """

    def __init__(self, max_bytes: int = sys.maxsize) -> None:
        self.max_bytes = max_bytes
        self.held_bytes = 0
        """Reserved bytes of all requests."""
        self.freed = anyio.Event()
        """Event that is set when bytes are released; a new event then replaces it."""

    def reservation(self) -> Reservation:
        """Return an empty reservation."""
        return Reservation(self)


class Reservation:
    """Memory reserved for the body and the reply of one request."""

    __slots__ = ("_budget", "count")

    def __init__(self, budget: MemoryBudget) -> None:
        self.count = 0
        """Reserved bytes."""
        self._budget = budget

    async def reserve(self, count: int, *, within_s: float = WAIT_S) -> None:
        """Increase the reservation to `count` bytes; do nothing up to `UNCOUNTED_BYTES`.

        Args:
            count: Bytes of body and reply together.
            within_s: Timeout, seconds.

        Raises:
            CapacityError: There was not enough memory within `within_s`.
        """
        if count <= max(UNCOUNTED_BYTES, self.count):
            return
        budget = self._budget
        with anyio.move_on_after(within_s):
            while budget.held_bytes > self.count and budget.held_bytes - self.count + count > budget.max_bytes:
                await budget.freed.wait()
            self.settle(count)
            return
        limit = f"{budget.max_bytes / (1 << 20):.4g} MiB"
        raise CapacityError(f"not enough memory for large bodies and replies (limit {limit}); retry later")

    def settle(self, count: int) -> None:
        """Set the reservation to the actual size `count`, even above the limit; to 0 if it is not counted."""
        count = count if count > UNCOUNTED_BYTES else 0
        budget, change = self._budget, count - self.count
        budget.held_bytes += change
        self.count = count
        if change < 0:
            freed, budget.freed = budget.freed, anyio.Event()
            freed.set()

    def free(self) -> None:
        """Release all memory of this reservation."""
        self.settle(0)


def reservation_of(scope: Mapping[str, Any]) -> Reservation:
    """Return the reservation of a request, which `envkit.http.server.middleware.AuthMiddleware` frees.

    Without that middleware, memory is not limited.
    """
    state = scope.get("state") or {}
    make = state.get("reservation", MemoryBudget().reservation)
    reservation: Reservation = make()
    return reservation
