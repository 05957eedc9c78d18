"""The bodies of requests and of answers: how many bytes of them a server holds at once, of all tenants together and of
each.

Whoever comes when there is no room waits for a moment, and is then told to come again. A body takes all the room that
it announces at once. An answer then takes what it is expected to become, before what it tells of is begun, since that
may not be safe to repeat; what it then is, it has in any case. Bodies that keep each other's answers from having room
are told to come again, as everybody is who waits. Small ones are not counted, since that would cost the quick requests,
which have those, more than it is worth: there are no more of them than connections.

Those that want much have half of the room, so that they never keep those out who want little.
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
"""Size up to which a body, or an answer, is not counted."""

LITTLE_BYTES = 4 << 20
"""What a request wants at most that wants little; the outputs of a program are that unless more is asked for."""

WAIT_S = 10.0
"""Seconds that a request waits for room; less than callers wait for an answer."""

_AGAIN_S = 1.0
_PIECE_BYTES = 1 << 20
"""What a body whose length is not known takes at once."""

_IN_PIECES = re.compile(re.escape(BEFORE_ID) + "[^/]+/tree")
"""Paths whose bodies go to the disk piece by piece."""


class MemoryBudget:
    """Those that a server holds.

    Args:
        most: Bytes that all may have together. A single one may have more when it is alone.
        share: Share of that which one tenant may have.
    """

    def __init__(self, most: int = sys.maxsize, share: float = 1.0) -> None:
        self._counts = _Count(most, share), _Count(most // 2, share)  # of all, and of those that want much
        self._sure = int(most * share) // 2
        self._freed = anyio.Event()
        self._waiting = 0
        self.sockets = _Count(most // 2, share)
        """What sockets hold, beside the others."""

    @property
    def held(self) -> int:
        """Bytes that requests and answers have together; sockets have others."""
        return self._counts[0].all

    def begin(self, room: Reservation, path: str, headers: Sequence[Header]) -> Body:
        """Return a body that has no room yet, of a request with this path and these headers."""
        return Body(room, _length(headers), is_held=is_held(path))

    def room(self, caller: Caller) -> Reservation:
        """Return the room of a request of `caller`; it is empty."""
        return Reservation(self, None if caller == EVERYBODY else caller.tenant)

    def backlog(self, caller: Caller) -> Backpressure:
        """Return what a socket of `caller` holds: nothing."""
        return Backpressure(self, None if caller == EVERYBODY else caller.tenant)

    async def hold(self, tenant: str | None, count: int, own: int = 0, *, within_s: float = WAIT_S) -> None:
        """Take room for `count` bytes, or wait until there is some.

        Args:
            tenant: Whose they are; None where there are no tenants.
            count: Number of bytes.
            own: How many the same request has already.
            within_s: Seconds to wait.

        Raises:
            RateLimitError: The tenant's other requests left no room for as long as that.
            CapacityError: Those of all tenants did.
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
        """Take room, whether there is some or not."""
        self._move(tenant, own, own + count)

    def free(self, tenant: str | None, count: int, own: int | None = None) -> None:
        """Give room back, `count` bytes of the `own` that a request had; of all that it had unless said."""
        own = count if own is None else own
        self._move(tenant, own, own - count)
        if self._waiting:
            freed, self._freed = self._freed, anyio.Event()
            freed.set()

    def try_hold(self, tenant: str | None, count: int, own: int = 0) -> bool:
        """Take room for `count` bytes as `hold` does, if there is some now."""
        if self._lack(tenant, own, own + count) is not None:
            return False
        self._move(tenant, own, own + count)
        return True

    def _move(self, tenant: str | None, before: int, after: int) -> None:
        everything, large = self._counts
        everything.add(tenant, after - before)
        if before > LITTLE_BYTES or after > LITTLE_BYTES:
            large.add(tenant, _much(after) - _much(before))

    def _lack(self, tenant: str | None, before: int, after: int) -> EnvkitError | None:
        """Return why a request that has `before` bytes cannot have `after`."""
        if self._counts[0].all - before + after <= self._sure:
            return None
        for counted, was, becomes in zip(self._counts, (before, _much(before)), (after, _much(after)), strict=True):
            most_mib = counted.most_each / (1 << 20)
            if counted.is_beyond_share(tenant, was, becomes):
                what = f"bodies and answers of {most_mib:.4g} MiB at once"
                return RateLimitError(f"the requests of a tenant may have {what}", _AGAIN_S)
            if counted.is_beyond(was, becomes):
                what = f"bodies and answers of {counted.most / (1 << 20):.4g} MiB at once"
                return CapacityError(f"the server holds {what}, and has no room; come again")
        return None


def is_held(path: str) -> bool:
    """Say whether the bodies of requests with this path are held until they are complete."""
    return _IN_PIECES.fullmatch(path) is None


def announced_bytes(scope: Mapping[str, Any]) -> int:
    """Return how many bytes of memory the body of a request takes, as it announces them."""
    length = _length(scope["headers"]) if is_held(scope["path"]) else None
    return length or 0


def room_of(scope: Mapping[str, Any]) -> Reservation:
    """Return the room of the request of an ASGI scope, which `envkit.http.server.middleware.Guard` frees."""
    state = scope.get("state") or {}
    make: Callable[[], Reservation] = state.get("room", _without_bound)
    return make()


def bodies_of(scope: Mapping[str, Any]) -> MemoryBudget:
    """Return those of the guard before a socket."""
    bodies: MemoryBudget | None = (scope.get("state") or {}).get("bodies")
    return bodies or MemoryBudget()


def _length(headers: Sequence[Header]) -> int | None:
    length = next((value for name, value in headers if name == b"content-length"), b"")
    return int(length) if length.isdigit() else None


def _without_bound() -> Reservation:
    return MemoryBudget().room(EVERYBODY)


def _much(count: int) -> int:
    """Return a request's bytes if it wants much."""
    return count if count > LITTLE_BYTES else 0


class _Count:
    """How many bytes there are of something, and of each tenant."""

    def __init__(self, most: int, share: float) -> None:
        self.most = most
        self.most_each = int(most * share)
        self.all = 0
        self._each: Counter[str] = Counter()

    def add(self, tenant: str | None, count: int) -> None:
        self.all += count
        if tenant is not None:
            self._each[tenant] += count
            if not self._each[tenant]:
                del self._each[tenant]

    def is_beyond_share(self, tenant: str | None, before: int, after: int) -> bool:
        """Say whether a tenant would have too much if one that has `before` bytes had `after`; alone it may."""
        if tenant is None:
            return False
        others = self._each[tenant] - before
        return others > 0 and after > before and others + after > self.most_each

    def is_beyond(self, before: int, after: int) -> bool:
        """Say the same of all together."""
        others = self.all - before
        return others > 0 and after > before and others + after > self.most

    def is_too_much(self, tenant: str | None) -> bool:
        """Say whether there is too much already, of the tenant or of all."""
        return self.all > self.most or (tenant is not None and self._each[tenant] > self.most_each)


class Reservation:
    """What one request, or one frame of a socket, has of it: for its body and for its answer."""

    __slots__ = ("_answer", "_bodies", "_count", "_users", "is_expected", "tenant")

    def __init__(self, bodies: MemoryBudget, tenant: str | None) -> None:
        self.tenant = tenant
        self.is_expected = False
        """Whether the answer was asked for before it was there."""
        self._bodies = bodies
        self._count = 0
        self._answer = 0
        self._users = 1

    @property
    def count(self) -> int:
        """Bytes that it has, for body and answer together."""
        return self._count

    async def grow(self, count: int, *, within_s: float = WAIT_S) -> None:
        """Take room for `count` bytes more. Raises as `MemoryBudget.hold`."""
        await self._bodies.hold(self.tenant, count, self._count, within_s=within_s)
        self._count += count

    async def expect(self, most: int, *, within_s: float = WAIT_S) -> None:
        """Take room for an answer of `most` bytes, before what it tells of is begun. Raises as `MemoryBudget.hold`."""
        if most > UNCOUNTED_BYTES and (count := most - self._answer) > 0:
            if self._bodies.try_hold(self.tenant, count, self._count):
                self._count += count
            else:
                await self.grow(count, within_s=within_s)
            self._answer = most
        self.is_expected = True

    def settle(self, size: int) -> None:
        """Have room for an answer that has `size` bytes after all."""
        size = 0 if size <= UNCOUNTED_BYTES else size
        if size > self._answer:
            self._bodies.take(self.tenant, size - self._answer, self._count)
        elif size < self._answer:
            self._bodies.free(self.tenant, self._answer - size, self._count)
        self._count += size - self._answer
        self._answer = size
        self.is_expected = True

    def another(self) -> Reservation:
        """Return an empty one of the same tenant."""
        return Reservation(self._bodies, self.tenant)

    def share(self) -> None:
        """Give it one more owner, each of whom frees it."""
        self._users += 1

    def free(self) -> None:
        """Give everything back, once the last owner does."""
        self._users -= 1
        if not self._users and self._count:
            self._bodies.free(self.tenant, self._count)
            self._count = self._answer = 0


class Body:
    """That of one request, which is not small; made by `MemoryBudget.begin`."""

    def __init__(self, room: Reservation, length: int | None, *, is_held: bool) -> None:
        self._room = room
        self._length = length
        self._is_held = is_held
        self._count = 0

    async def reach(self, count: int) -> int:
        """Find room for `count` bytes at least; return how many there is room for.

        Raises: As `MemoryBudget.hold`.
        """
        if not self._is_held:
            return sys.maxsize
        wanted = count + _PIECE_BYTES if self._length is None else max(self._length, count)
        await self._room.grow(wanted - self._count)
        self._count = wanted
        return wanted


class Backpressure:
    """What one socket holds: frames that came and are not answered, and answers that nobody has read.

    Nothing of it is refused. A socket that holds more than a little is not read on while sockets hold too much, which
    keeps nobody out who reads.
    """

    def __init__(self, bodies: MemoryBudget, tenant: str | None) -> None:
        self._bodies = bodies
        self._tenant = tenant
        self.count = 0
        """Bytes that are counted."""

    def hold(self, count: int) -> None:
        """Hold `count` bytes from now on."""
        count = 0 if count <= UNCOUNTED_BYTES else count
        if count != self.count:
            self._bodies.sockets.add(self._tenant, count - self.count)
            self.count = count

    @property
    def is_too_much(self) -> bool:
        """Whether sockets hold too much, this one among them."""
        return self.count > 0 and self._bodies.sockets.is_too_much(self._tenant)

    @property
    def is_alone(self) -> bool:
        """Whether no other socket holds anything that is counted."""
        return self.count == self._bodies.sockets.all
