"""Memory budget: limits the bytes of large request bodies and replies that a server has in memory at once.

A request whose body or expected answer is larger than `UNCOUNTED_BYTES` reserves memory before its call begins. If not
enough memory is free, the request waits up to `WAIT_S` seconds and is then rejected. The caller can repeat it, because
its call has had no effect. When the call has ended, the actual size of its answer replaces the expected size. Smaller
requests reserve no memory; the limit on concurrent requests bounds the memory that they use.
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
        max_bytes: Maximum bytes that all requests together may reserve. A request that is alone may reserve more.
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
        """Increase the reservation to `count` bytes; wait until that much memory is free.

        Args:
            count: Bytes of body and reply together. Up to `UNCOUNTED_BYTES`, nothing is reserved.
            within_s: Maximum seconds to wait.

        Raises:
            CapacityError: There was not enough free memory within `within_s` seconds.
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
        """Set the reservation to `count` bytes, even above the budget; to 0 if `count` is at most `UNCOUNTED_BYTES`."""
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
    """Return the memory reservation of a request. `envkit.http.server.middleware.AuthMiddleware` frees it at the end.

    Without that middleware, memory is not limited.
    """
    state = scope.get("state") or {}
    make = state.get("reservation", MemoryBudget().reservation)
    reservation: Reservation = make()
    return reservation
