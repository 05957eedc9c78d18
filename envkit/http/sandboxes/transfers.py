"""Files and folders of a sandbox over HTTP, in pieces, so that none of them fills the server's memory.

A folder travels as a tar stream and waits on the server's disk, in a private folder, until it is complete; whatever
happens, that folder is removed. Uploads are unpacked as hostile input by `FolderTransport`, which the application is
handed, since the server does not know the insides of sandboxes.

Of each tenant a few travel at once, which bounds the disk that it takes, and some wait for that; more are refused.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import anyio

from envkit.errors import DeadlineError, RateLimitError, TooLargeError
from envkit.http.protocol.asgi import Receive, Send, receive_piece
from envkit.protocols import Sandbox
from envkit.types import FileUser

MAX_TREE_BYTES = 1 << 30
"""Bound on the contents of a file or folder that travels as a tar stream."""

MAX_FILE_BYTES = 64 << 20
"""Bound on a file that is read or written whole."""

TAR = b"application/x-tar"
AT_ONCE = 4
"""Folders of one tenant that travel at once."""

MAX_WAITING = 60
"""Further ones that wait for that."""

_ALL_AT_ONCE = 32
_BOUND_S = 3600.0
_NAME = "tree"


class FolderTransport(Protocol):
    """Files, links and folders as tar streams; `envkit.sandbox.transfer.tar_stream` is one."""

    def packed(self, source: Path, name: str) -> AsyncGenerator[bytes, None]:
        """Yield what `source` is, in pieces; what is no folder is called `name`.

        Raises:
            UsageError: It is missing, cannot be read, or holds what is neither file, folder nor link.
        """
        ...

    async def unpacked(
        self, pieces: AsyncIterator[bytes], target: Path, *, max_bytes: int, takes_any_link: bool = False
    ) -> None:
        """Write a stream to `target`, or nothing at all.

        Raises:
            UsageError: `target` exists, or its folder does not.
            TooLargeError: It has more than `max_bytes`.
            RefusedFileError: It holds what must not be copied, such as links that lead out.
        """
        ...

    def waiting_place(self) -> AbstractAsyncContextManager[Path]:
        """Give a new, private folder for the length of the block."""
        ...


class FolderTransfers:
    """Takes folders for sandboxes, and gives those of sandboxes.

    Args:
        trees: Packs and unpacks them.
        max_bytes: Bound on what one holds.
    """

    def __init__(self, trees: FolderTransport, max_bytes: int = MAX_TREE_BYTES) -> None:
        self._trees = trees
        self._max_bytes = max_bytes
        self._door = anyio.CapacityLimiter(_ALL_AT_ONCE)
        self._lines: dict[str, _LinePipe] = {}

    async def take(self, sandbox: Sandbox, path: str, user: FileUser, receive: Receive, *, tenant: str) -> None:
        """Copy the tar stream of a request into a sandbox, as `path`.

        Raises:
            RateLimitError: The tenant has as many on their way as it may.
            EnvkitError: As `FolderTransport.unpacked` and `Sandbox.upload`.
        """
        with anyio.move_on_after(_BOUND_S):
            async with self._place(tenant) as place:
                target = place / _NAME
                async with aclosing(_pieces(receive, 2 * self._max_bytes + (16 << 20))) as pieces:
                    await self._trees.unpacked(pieces, target, max_bytes=self._max_bytes, takes_any_link=True)
                await sandbox.upload(target, path, user=user)
                return
        raise DeadlineError(f"the folder was not there within {_BOUND_S:g} s")

    async def give(
        self, sandbox: Sandbox, path: str, user: FileUser, max_bytes: int, send: Send, *, tenant: str
    ) -> None:
        """Send a file or folder of a sandbox as the tar stream of a response.

        Raises:
            RateLimitError: The tenant has as many on their way as it may.
            EnvkitError: As `Sandbox.download`; the response has not begun then.
        """
        with anyio.move_on_after(_BOUND_S):
            async with self._place(tenant) as place:
                most = min(max_bytes, self._max_bytes)
                await sandbox.download(path, place / _NAME, max_bytes=most, user=user)
                await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", TAR)]})
                async with aclosing(self._trees.packed(place / _NAME, _NAME)) as pieces:
                    async for piece in pieces:
                        await send({"type": "http.response.body", "body": piece, "more_body": True})
                await send({"type": "http.response.body", "body": b""})

    @asynccontextmanager
    async def _place(self, tenant: str) -> AsyncIterator[Path]:
        line = self._lines.setdefault(tenant, _LinePipe())
        if line.count >= AT_ONCE + MAX_WAITING:
            raise RateLimitError(f"{line.count} folders are on their way, which is all that a tenant may have", 1.0)
        line.count += 1
        try:
            async with line.door, self._door, self._trees.waiting_place() as place:
                yield place
        finally:
            line.count -= 1
            if not line.count:
                del self._lines[tenant]


@dataclass(slots=True)
class _LinePipe:
    count: int = 0
    door: anyio.CapacityLimiter = field(default_factory=lambda: anyio.CapacityLimiter(AT_ONCE))


async def _pieces(receive: Receive, most: int) -> AsyncGenerator[bytes, None]:
    count = 0
    while (message := await receive_piece(receive))["type"] == "http.request":
        piece: bytes = message.get("body", b"")
        count += len(piece)
        if count > most:
            raise TooLargeError(f"a folder may have {most} bytes")
        yield piece
        if not message.get("more_body", False):
            return
