"""Upload and download of files and folders of a sandbox, streamed over HTTP so that the server needs little memory.

A folder is sent as a tar stream. The server first stores the whole folder in a private staging folder on its disk, and
removes the staging folder after the transfer, even if the transfer fails. A `FolderTransport` unpacks the tar streams
of uploads and treats them as hostile input. The caller of `create_app` passes this object, because the package
`envkit.http` must not import the sandbox backends.

Each tenant has a limit on concurrent transfers, which also limits the disk space that the tenant uses. Transfers above
the limit wait in a queue; if the queue is full, a transfer is rejected.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from pathlib import Path
from typing import Protocol

import anyio

from envkit.errors import DeadlineError, RateLimitError, TooLargeError
from envkit.http.protocol.asgi import Receive, Send
from envkit.http.protocol.file_messages import MAX_TREE_BYTES
from envkit.http.protocol.operations import TAR
from envkit.protocols import Sandbox
from envkit.types import FileUser

AT_ONCE = 4
"""Maximum number of concurrent transfers of one tenant."""

MAX_WAITING = 60
"""Maximum number of queued transfers of one tenant."""

_SERVER_AT_ONCE = 32
_TIMEOUT_S = 3600.0
_NAME = "tree"


class FolderTransport(Protocol):
    """Packs and unpacks tar streams of files, links and folders; see `envkit.sandbox.transfer.tar_stream`."""

    def packed(self, source: Path, name: str) -> AsyncGenerator[bytes, None]: ...

    async def unpacked(
        self, pieces: AsyncIterator[bytes], target: Path, *, max_bytes: int, allows_any_link: bool = False
    ) -> None: ...

    def staging_folder(self) -> AbstractAsyncContextManager[Path]: ...


class FolderTransfers:
    """Uploads files and folders to sandboxes, and downloads them.

    Args:
        folder_transport: Packs and unpacks folders.
        max_bytes: Maximum size of the contents of a folder, in bytes.
    """

    def __init__(self, folder_transport: FolderTransport, max_bytes: int = MAX_TREE_BYTES) -> None:
        self._folder_transport = folder_transport
        self._max_bytes = max_bytes
        self._limiter = anyio.CapacityLimiter(_SERVER_AT_ONCE)
        self._tenants = defaultdict[str, anyio.CapacityLimiter](lambda: anyio.CapacityLimiter(AT_ONCE))

    async def upload(self, sandbox: Sandbox, path: str, user: FileUser, receive: Receive, *, tenant: str) -> None:
        """Unpack the tar stream in the body of a request, and copy the contents to `path` in a sandbox.

        Raises:
            RateLimitError: The tenant has too many running and waiting transfers.
            EnvkitError: See `FolderTransport.unpacked` and `Sandbox.upload`.
        """
        with anyio.move_on_after(_TIMEOUT_S):
            async with self._staging_folder(tenant) as folder:
                target = folder / _NAME
                async with aclosing(_pieces(receive, 2 * self._max_bytes + (16 << 20))) as pieces:
                    await self._folder_transport.unpacked(
                        pieces, target, max_bytes=self._max_bytes, allows_any_link=True
                    )
                await sandbox.upload(target, path, user=user)
                return
        raise DeadlineError(f"the upload exceeded its timeout of {_TIMEOUT_S:g} s")

    async def download(
        self, sandbox: Sandbox, path: str, user: FileUser, max_bytes: int, send: Send, *, tenant: str
    ) -> None:
        """Copy a file or folder out of a sandbox, and send it as a tar stream in the body of a response.

        Raises:
            RateLimitError: The tenant has too many running and waiting transfers.
            EnvkitError: See `Sandbox.download`. Raised before the response starts.
        """
        with anyio.move_on_after(_TIMEOUT_S):
            async with self._staging_folder(tenant) as folder:
                most = min(max_bytes, self._max_bytes)
                await sandbox.download(path, folder / _NAME, max_bytes=most, user=user)
                await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", TAR.encode())]})
                async with aclosing(self._folder_transport.packed(folder / _NAME, _NAME)) as pieces:
                    async for piece in pieces:
                        await send({"type": "http.response.body", "body": piece, "more_body": True})
                await send({"type": "http.response.body", "body": b""})

    @asynccontextmanager
    async def _staging_folder(self, tenant: str) -> AsyncIterator[Path]:
        limiter = self._tenants[tenant]
        if limiter.statistics().tasks_waiting >= MAX_WAITING:
            most = AT_ONCE + MAX_WAITING
            raise RateLimitError(f"too many transfers of this tenant (limit {most}); retry later", 1.0)
        async with limiter, self._limiter, self._folder_transport.staging_folder() as folder:
            yield folder


async def _pieces(receive: Receive, most: int) -> AsyncGenerator[bytes, None]:
    count = 0
    while (message := await receive())["type"] == "http.request":
        piece: bytes = message.get("body", b"")
        count += len(piece)
        if count > most:
            raise TooLargeError(f"the tar stream exceeds {most} bytes")
        yield piece
        if not message.get("more_body", False):
            return
