"""The bodies of requests: how many bytes of them a server holds at once, of all tenants together and of each.

Who comes when there is no room waits for a moment, and is then told to come again. A body takes all the room that it
announces at once, so that none holds some while it waits for more. Small bodies are not counted, since that would cost
the quick requests, which have those, more than it is worth: there are no more of them than connections.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Sequence

import anyio

from envkit.errors import CapacityError, RateLimitError
from envkit.http.asgi import Header
from envkit.http.callers import EVERYBODY, Caller
from envkit.http.sandbox_wire import BEFORE_ID

UNCOUNTED_BYTES = 64 << 10
"""Size up to which a body is not counted."""

WAIT_S = 10.0
"""Seconds that a body waits for room; less than callers wait for an answer."""

_AGAIN_S = 1.0
_PIECE_BYTES = 1 << 20
"""What a body whose length is not known takes at once."""

_IN_PIECES = re.compile(re.escape(BEFORE_ID) + "[^/]+/tree")
"""Paths whose bodies go to the disk piece by piece."""


class Bodies:
    """Those that a server holds.

    Args:
        most: Bytes that all may have together. A single one may have more when it is alone.
        share: Share of that which one tenant may have.
    """

    def __init__(self, most: int = sys.maxsize, share: float = 1.0) -> None:
        self._most = most
        self._most_each = int(most * share)
        self._all = 0
        self._each: Counter[str] = Counter()
        self._freed = anyio.Event()

    def begin(self, caller: Caller, path: str, headers: Sequence[Header]) -> Body:
        """Return a body that has no room yet, of a request with this path and these headers."""
        length = next((value for name, value in headers if name == b"content-length"), b"")
        tenant = None if caller is EVERYBODY else caller.tenant
        return Body(self, tenant, int(length) if length.isdigit() else None, is_held=not _IN_PIECES.fullmatch(path))

    async def hold(self, tenant: str | None, count: int, own: int = 0) -> None:
        """Take room for `count` bytes, or wait until there is some.

        Args:
            tenant: Whose they are; None where there are no tenants.
            count: Number of bytes.
            own: How many the same body has already.

        Raises:
            RateLimitError: The tenant's other bodies left no room for as long as `WAIT_S`.
            CapacityError: Those of all tenants did.
        """
        with anyio.move_on_after(WAIT_S):
            while self._is_beyond_share(tenant, count, own) or self._is_full(count, own):
                await self._freed.wait()
        if self._is_beyond_share(tenant, count, own):
            most_mib = self._most_each / (1 << 20)
            raise RateLimitError(f"the requests of a tenant may have bodies of {most_mib:.4g} MiB at once", _AGAIN_S)
        if self._is_full(count, own):
            most_mib = self._most / (1 << 20)
            raise CapacityError(f"the server holds bodies of {most_mib:.4g} MiB at once, and has no room; come again")
        self._all += count
        if tenant is not None:
            self._each[tenant] += count

    def free(self, tenant: str | None, count: int) -> None:
        """Give room back."""
        self._all -= count
        if tenant is not None:
            self._each[tenant] -= count
            if not self._each[tenant]:
                del self._each[tenant]
        freed, self._freed = self._freed, anyio.Event()
        freed.set()

    def _is_beyond_share(self, tenant: str | None, count: int, own: int) -> bool:
        return tenant is not None and self._each[tenant] > own and self._each[tenant] + count > self._most_each

    def _is_full(self, count: int, own: int) -> bool:
        return self._all > own and self._all + count > self._most


class Body:
    """That of one request, which is not small; made by `Bodies.begin`."""

    def __init__(self, bodies: Bodies, tenant: str | None, length: int | None, *, is_held: bool) -> None:
        self._bodies = bodies
        self._tenant = tenant
        self._length = length
        self._is_held = is_held
        self._room = 0

    async def reach(self, count: int) -> int:
        """Find room for `count` bytes at least; return how many there is room for.

        Raises: As `Bodies.hold`.
        """
        if not self._is_held:
            return sys.maxsize
        wanted = count + _PIECE_BYTES if self._length is None else max(self._length, count)
        await self._bodies.hold(self._tenant, wanted - self._room, self._room)
        self._room = wanted
        return wanted

    def free(self) -> None:
        """Give its room back."""
        if self._room:
            self._bodies.free(self._tenant, self._room)
            self._room = 0
