"""Memory budget: limits the memory of request bodies, answers and sockets, for the whole server and for each tenant.

A request that does not fit waits up to `WAIT_S` and then fails with a retryable error. A body reserves its announced
length. Memory for the answer is reserved before the call begins, because the call may not be safe to repeat; when the
call has ended, the actual size is counted, even if it is larger. If requests hold memory for their bodies and wait for
each other to get memory for their answers, they time out. Bodies and answers up to `UNCOUNTED_BYTES` are not counted,
because counting would slow down quick requests; the limit on connections limits them.

Requests above 4 MiB share half of the budget, so they cannot starve small ones.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import anyio

from envkit.errors import CapacityError, EnvkitError, RateLimitError
from envkit.http.auth.caller import EVERYBODY, Caller
from envkit.http.protocol.asgi import Header
from envkit.http.protocol.sandbox_messages import BEFORE_ID

UNCOUNTED_BYTES = 64 << 10
"""Maximum size of a body or answer that is not counted."""

LITTLE_BYTES = 4 << 20
"""Maximum size of a small request in bytes; with the default limits, the outputs of a program are smaller."""

WAIT_S = 10.0
"""Seconds that a request waits for memory; clients wait longer than that for an answer."""

_RETRY_S = 1.0
_STEP_BYTES = 1 << 20
"""Bytes by which the reservation of a body of unknown length grows."""

_STREAMED = re.compile(re.escape(BEFORE_ID) + "[^/]+/tree")
"""Paths whose bodies are streamed to disk."""


class MemoryBudget:
    """The memory budget of one server.

    Args:
        max_bytes: Limit of all requests together. A single request may exceed it when it is alone.
        share: Fraction of the limit for one tenant.
    """

    def __init__(self, max_bytes: int = sys.maxsize, share: float = 1.0) -> None:
        self._counts = _Count(max_bytes, share), _Count(max_bytes // 2, share)  # of all, and of large requests
        self._always_free = int(max_bytes * share) // 2
        self._freed = anyio.Event()
        self._waiting = 0
        self.sockets = _Count(max_bytes // 2, share)
        """Memory of sockets, which is counted separately."""

    @property
    def held(self) -> int:
        """Bytes of all requests and answers, without sockets."""
        return self._counts[0].total

    def begin(self, reservation: Reservation, path: str, headers: Sequence[Header]) -> Body:
        """Return the body of a request, with nothing reserved yet."""
        return Body(reservation, _length(headers), is_buffered=_is_buffered(path))

    def reservation(self, caller: Caller) -> Reservation:
        """Return an empty reservation for a request of `caller`."""
        return Reservation(self, None if caller == EVERYBODY else caller.tenant)

    def backpressure(self, caller: Caller) -> Backpressure:
        """Return a memory counter for a socket of `caller`."""
        return Backpressure(self, None if caller == EVERYBODY else caller.tenant)

    async def hold(self, tenant: str | None, count: int, own: int = 0, *, within_s: float = WAIT_S) -> None:
        """Reserve `count` bytes, waiting for `within_s` seconds at most.

        Args:
            tenant: Owner; None without tenants.
            count: Number of bytes.
            own: Bytes that the same request has reserved already.
            within_s: Timeout, seconds.

        Raises:
            RateLimitError: The tenant's limit was exceeded all that time.
            CapacityError: The limit of all tenants together was exceeded all that time.
        """
        if self._lack(tenant, own, own + count) is not None:
            self._waiting += 1
            try:
                with anyio.move_on_after(within_s):
                    while self._lack(tenant, own, own + count) is not None:
                        await self._freed.wait()
            finally:
                self._waiting -= 1
            if (lack := self._lack(tenant, own, own + count)) is not None:
                raise lack
        self.take(tenant, count, own)

    def take(self, tenant: str | None, count: int, own: int = 0) -> None:
        """Reserve `count` bytes, even above the limit."""
        self._move(tenant, own, own + count)

    def free(self, tenant: str | None, count: int, own: int | None = None) -> None:
        """Release `count` of the `own` bytes of a request; by default `count` is all that it had."""
        own = count if own is None else own
        self._move(tenant, own, own - count)
        if self._waiting:
            freed, self._freed = self._freed, anyio.Event()
            freed.set()

    def try_hold(self, tenant: str | None, count: int, own: int = 0) -> bool:
        """Reserve `count` bytes without waiting; return whether they fit."""
        if self._lack(tenant, own, own + count) is not None:
            return False
        self._move(tenant, own, own + count)
        return True

    def _move(self, tenant: str | None, before: int, after: int) -> None:
        everything, large = self._counts
        everything.add(tenant, after - before)
        if before > LITTLE_BYTES or after > LITTLE_BYTES:
            large.add(tenant, _if_large(after) - _if_large(before))

    def _lack(self, tenant: str | None, before: int, after: int) -> EnvkitError | None:
        """Return why a request cannot grow from `before` to `after` bytes."""
        if self._counts[0].total - before + after <= self._always_free:
            return None
        sizes = (before, after), (_if_large(before), _if_large(after))
        for counted, (was, becomes) in zip(self._counts, sizes, strict=True):
            if counted.is_above_share(tenant, was, becomes):
                limit = f"{counted.tenant_limit / (1 << 20):.4g} MiB per tenant"
                return RateLimitError(f"too many bytes of bodies and answers (limit {limit}); retry later", _RETRY_S)
            if counted.is_above_limit(was, becomes):
                limit = f"{counted.limit / (1 << 20):.4g} MiB"
                return CapacityError(f"too many bytes of bodies and answers (limit {limit}); retry later")
        return None


def _is_buffered(path: str) -> bool:
    """Return whether the bodies of requests with this path are buffered until they are complete."""
    return _STREAMED.fullmatch(path) is None


def announced_bytes(scope: Mapping[str, Any]) -> int:
    """Return the buffered bytes that a request announces; 0 without a content length."""
    length = _length(scope["headers"]) if _is_buffered(scope["path"]) else None
    return length or 0


def reservation_of(scope: Mapping[str, Any]) -> Reservation:
    """Return the reservation of a request, which `envkit.http.server.middleware.AuthMiddleware` frees."""
    state = scope.get("state") or {}
    make: Callable[[], Reservation] = state.get("reservation", _unlimited)
    return make()


def memory_budget_of(scope: Mapping[str, Any]) -> MemoryBudget:
    """Return the memory budget that the middleware put into the scope of a socket; without it, an unlimited budget."""
    budget: MemoryBudget | None = (scope.get("state") or {}).get("memory_budget")
    return budget or MemoryBudget()


def _length(headers: Sequence[Header]) -> int | None:
    length = next((value for name, value in headers if name == b"content-length"), b"")
    return int(length) if length.isdigit() else None


def _unlimited() -> Reservation:
    return MemoryBudget().reservation(EVERYBODY)


def _if_large(count: int) -> int:
    """Return the bytes of a request if it is large, else 0."""
    return count if count > LITTLE_BYTES else 0


class _Count:
    """Bytes in use, in total and per tenant."""

    def __init__(self, limit: int, share: float) -> None:
        self.limit = limit
        self.tenant_limit = int(limit * share)
        self.total = 0
        self._each: Counter[str] = Counter()

    def add(self, tenant: str | None, count: int) -> None:
        self.total += count
        if tenant is not None:
            self._each[tenant] += count
            if not self._each[tenant]:
                del self._each[tenant]

    def is_above_share(self, tenant: str | None, before: int, after: int) -> bool:
        """Return whether growth of a request puts its tenant above its share; a tenant's only request may exceed the
        share.
        """
        if tenant is None:
            return False
        others = self._each[tenant] - before
        return others > 0 and after > before and others + after > self.tenant_limit

    def is_above_limit(self, before: int, after: int) -> bool:
        """Return whether growth of a request puts the server above its limit; an only request may exceed the limit."""
        others = self.total - before
        return others > 0 and after > before and others + after > self.limit

    def is_too_much(self, tenant: str | None) -> bool:
        """Return whether the tenant or all together are above the limit now."""
        return self.total > self.limit or (tenant is not None and self._each[tenant] > self.tenant_limit)


class Reservation:
    """Memory reserved for the body and the answer of one request or socket frame."""

    __slots__ = ("_answer", "_budget", "_count", "_users", "is_expected", "tenant")

    def __init__(self, budget: MemoryBudget, tenant: str | None) -> None:
        self.tenant = tenant
        self.is_expected = False
        """Whether the answer's memory was reserved before the call."""
        self._budget = budget
        self._count = 0
        self._answer = 0
        self._users = 1

    @property
    def count(self) -> int:
        """Reserved bytes, for body and answer together."""
        return self._count

    async def grow(self, count: int, *, within_s: float = WAIT_S) -> None:
        """Reserve `count` more bytes. Raises as `MemoryBudget.hold`."""
        await self._budget.hold(self.tenant, count, self._count, within_s=within_s)
        self._count += count

    async def expect(self, most: int, *, within_s: float = WAIT_S) -> None:
        """Reserve `most` bytes for an answer before the call begins. Raises as `MemoryBudget.hold`."""
        if most > UNCOUNTED_BYTES and (count := most - self._answer) > 0:
            if self._budget.try_hold(self.tenant, count, self._count):
                self._count += count
            else:
                await self.grow(count, within_s=within_s)
            self._answer = most
        self.is_expected = True

    def settle(self, size: int) -> None:
        """Change the reservation of the answer to its actual `size`."""
        size = 0 if size <= UNCOUNTED_BYTES else size
        if size > self._answer:
            self._budget.take(self.tenant, size - self._answer, self._count)
        elif size < self._answer:
            self._budget.free(self.tenant, self._answer - size, self._count)
        self._count += size - self._answer
        self._answer = size
        self.is_expected = True

    def another(self) -> Reservation:
        """Return an empty reservation of the same tenant."""
        return Reservation(self._budget, self.tenant)

    def share(self) -> None:
        """Add an owner; each owner calls `free`."""
        self._users += 1

    def free(self) -> None:
        """Release all bytes once the last owner calls it."""
        self._users -= 1
        if not self._users and self._count:
            self._budget.free(self.tenant, self._count)
            self._count = self._answer = 0


class Body:
    """The body of a request above `UNCOUNTED_BYTES`; made by `MemoryBudget.begin`."""

    def __init__(self, reservation: Reservation, length: int | None, *, is_buffered: bool) -> None:
        self._reservation = reservation
        self._length = length
        self._is_buffered = is_buffered
        self._count = 0

    async def reserve(self, count: int) -> int:
        """Reserve `count` bytes or more; return the number reserved.

        Raises: As `MemoryBudget.hold`.
        """
        if not self._is_buffered:
            return sys.maxsize
        wanted = count + _STEP_BYTES if self._length is None else max(self._length, count)
        await self._reservation.grow(wanted - self._count)
        self._count = wanted
        return wanted


class Backpressure:
    """Memory of one socket: unanswered frames and unread answers.

    No frame is rejected. While all sockets together exceed their limit, the server does not read from sockets above
    `UNCOUNTED_BYTES`, so clients that read their answers can continue.
    """

    def __init__(self, budget: MemoryBudget, tenant: str | None) -> None:
        self._budget = budget
        self._tenant = tenant
        self.count = 0
        """Counted bytes of this socket."""

    def hold(self, count: int) -> None:
        """Set the socket's bytes to `count`."""
        count = 0 if count <= UNCOUNTED_BYTES else count
        if count != self.count:
            self._budget.sockets.add(self._tenant, count - self.count)
            self.count = count

    @property
    def is_too_much(self) -> bool:
        """Whether all sockets together exceed their limit and this socket is counted."""
        return self.count > 0 and self._budget.sockets.is_too_much(self._tenant)

    @property
    def is_alone(self) -> bool:
        """Whether no other socket is counted."""
        return self.count == self._budget.sockets.total
