"""Upload and download of files and folders of a sandbox over HTTP; folders are streamed, to need little memory.

A folder is sent as a tar stream. The server first stores the whole folder in a private staging folder on its disk, and
removes the staging folder after the transfer, even if the transfer fails. A `FolderTransport` unpacks the tar streams
of uploads and treats them as hostile input. The caller of `create_app` passes this object, because the package
`envkit.http` must not import the sandbox backends.

Each tenant has a limit on concurrent transfers, which also limits the disk space that the tenant uses. Transfers above
the limit wait in a queue; if the queue is full, a transfer is rejected.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import anyio

from envkit.errors import DeadlineError, RateLimitError, TooLargeError, UnsupportedError
from envkit.http.auth.caller import Caller
from envkit.http.protocol import file_messages as files
from envkit.http.protocol import operations as table
from envkit.http.protocol.asgi import CallOutcome, HttpCall, Receive, handles_http, respond
from envkit.http.protocol.messages import DoneReply, write
from envkit.http.protocol.operations import Operation
from envkit.http.sandboxes.access import FILE_S, SandboxAccess, within

AT_ONCE = 4
"""Maximum number of concurrent transfers of one tenant."""

MAX_WAITING = 60
"""Maximum number of queued transfers of one tenant."""

_SERVER_AT_ONCE = 32
_TIMEOUT_S = 3600.0
_NAME = "tree"

RunCall: TypeAlias = Callable[[Operation[Any, Any], Any, Caller], Awaitable[CallOutcome]]


class FolderTransport(Protocol):
    """Packs and unpacks tar streams of files, links and folders; see `envkit.sandbox.transfer.tar_stream`."""

    def packed(self, source: Path, name: str) -> AsyncGenerator[bytes, None]: ...

    async def unpacked(
        self, pieces: AsyncIterator[bytes], target: Path, *, max_bytes: int, allows_any_link: bool = False
    ) -> None: ...

    def staging_folder(self) -> AbstractAsyncContextManager[Path]: ...


class FileTransfers:
    """The operations that read and write files and folders of sandboxes over HTTP.

    Args:
        access: Finds sandboxes.
        outcome: Runs a call of an operation that another class handles, as `Dispatcher.outcome` does.
        folder_transport: Packs and unpacks folders; None if this server does not support that.
    """

    def __init__(self, access: SandboxAccess, outcome: RunCall, folder_transport: FolderTransport | None) -> None:
        self._access = access
        self._outcome = outcome
        self._folder_transport = folder_transport
        self._limiter = anyio.CapacityLimiter(_SERVER_AT_ONCE)
        self._tenants = defaultdict[str, anyio.CapacityLimiter](lambda: anyio.CapacityLimiter(AT_ONCE))

    @handles_http(table.READ_FILE)
    async def read_file(self, query: files.ReadFile, call: HttpCall) -> None:
        """Read a file."""
        sandbox = self._access.find(query.sandbox_id, call.caller)
        read = partial(sandbox.read, query.path, max_bytes=query.max_bytes, user=query.user)
        await respond(call.send, await within(FILE_S, read), content_type=table.BINARY.encode())

    @handles_http(table.WRITE_FILE)
    async def write_file(self, query: files.WriteFile, call: HttpCall) -> CallOutcome:
        """Write a file atomically: if writing fails, the file is unchanged. Missing folders are created."""
        # Reject an unknown sandbox now, before the body is read.
        self._access.find(query.sandbox_id, call.caller)
        content = await call.body(files.MAX_FILE_BYTES)
        mode = int(query.mode, 8) if query.mode else None
        frame = files.WriteFrame(query.sandbox_id, query.path, content, mode, query.key, query.user)
        return await self._outcome(table.WRITE, frame, call.caller)

    @handles_http(table.DOWNLOAD_TREE)
    async def download_tree(self, query: files.DownloadTree, call: HttpCall) -> None:
        """Download a file or folder as a tar stream. In the stream, a file is named ``tree`` and a folder ``.``."""
        transport, sandbox = self._require_transport(), self._access.find(query.sandbox_id, call.caller)
        with anyio.move_on_after(_TIMEOUT_S):
            async with self._staging_folder(transport, call.caller.tenant) as folder:
                most = min(query.max_bytes, files.MAX_TREE_BYTES)
                await sandbox.download(query.path, folder / _NAME, max_bytes=most, user=query.user)
                headers = [(b"content-type", table.TAR.encode())]
                await call.send({"type": "http.response.start", "status": 200, "headers": headers})
                async with aclosing(transport.packed(folder / _NAME, _NAME)) as pieces:
                    async for piece in pieces:
                        await call.send({"type": "http.response.body", "body": piece, "more_body": True})
                await call.send({"type": "http.response.body", "body": b""})

    @handles_http(table.UPLOAD_TREE)
    async def upload_tree(self, query: files.UploadTree, call: HttpCall) -> CallOutcome:
        """Upload a tar stream with one file, link or folder, which is stored at `path` in the sandbox."""
        transport, sandbox = self._require_transport(), self._access.find(query.sandbox_id, call.caller)
        with anyio.move_on_after(_TIMEOUT_S):
            async with self._staging_folder(transport, call.caller.tenant) as folder:
                async with aclosing(_pieces(call.receive)) as pieces:
                    most = files.MAX_TREE_BYTES
                    await transport.unpacked(pieces, folder / _NAME, max_bytes=most, allows_any_link=True)
                await sandbox.upload(folder / _NAME, query.path, user=query.user)
                return CallOutcome(write(DoneReply()))
        raise DeadlineError(f"the upload exceeded its timeout of {_TIMEOUT_S:g} s")

    def _require_transport(self) -> FolderTransport:
        if self._folder_transport is None:
            raise UnsupportedError("this server does not support uploads and downloads of folders")
        return self._folder_transport

    @asynccontextmanager
    async def _staging_folder(self, transport: FolderTransport, tenant: str) -> AsyncIterator[Path]:
        """Yield an empty folder; wait for one, or raise `RateLimitError` if too many of the tenant's transfers wait."""
        limiter = self._tenants[tenant]
        if limiter.statistics().tasks_waiting >= MAX_WAITING:
            most = AT_ONCE + MAX_WAITING
            raise RateLimitError(f"too many transfers of this tenant (limit {most}); retry later", 1.0)
        async with limiter, self._limiter, transport.staging_folder() as folder:
            yield folder


async def _pieces(receive: Receive) -> AsyncGenerator[bytes, None]:
    count, most = 0, 2 * files.MAX_TREE_BYTES + (16 << 20)
    while (message := await receive())["type"] == "http.request":
        piece: bytes = message.get("body", b"")
        count += len(piece)
        if count > most:
            raise TooLargeError(f"the tar stream exceeds {most} bytes")
        yield piece
        if not message.get("more_body", False):
            return
