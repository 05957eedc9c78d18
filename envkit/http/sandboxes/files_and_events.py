"""The operations on sandboxes that exist only over HTTP: files, folders, and the event stream."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import anyio

from envkit.errors import UnsupportedError
from envkit.http.auth.caller import Caller
from envkit.http.protocol import file_messages as files
from envkit.http.protocol import operations as table
from envkit.http.protocol import sandbox_messages as wire
from envkit.http.protocol.asgi import CallOutcome, Send, cancel_on_disconnect, respond
from envkit.http.protocol.handlers import HttpCall, handles_http
from envkit.http.protocol.messages import DoneReply, write
from envkit.http.protocol.operations import Operation
from envkit.http.sandboxes.access import FILE_S, SandboxAccess, within
from envkit.http.sandboxes.transfers import FolderTransfers
from envkit.types import PoolEvent, TenantKey

HEARTBEAT_S = 15.0
"""Seconds between the heartbeats of an event stream."""

RunCall: TypeAlias = Callable[[Operation[Any, Any], Any, Caller], Awaitable[CallOutcome]]


class FilesAndEvents:
    """The operations on sandboxes that exist only over HTTP.

    Args:
        access: Finds sandboxes.
        outcome: Runs a call of an operation that another class handles, as `Dispatcher.outcome` does.
        folders: Uploads and downloads folders; None if this server does not support that.
    """

    def __init__(
        self,
        access: SandboxAccess,
        outcome: RunCall,
        folders: FolderTransfers | None,
    ) -> None:
        self._access = access
        self._outcome = outcome
        self._folders = folders

    @handles_http(table.READ_FILE)
    async def read_file(self, query: files.ReadFile, call: HttpCall) -> None:
        """Read a file."""
        sandbox = self._access.find(query.sandbox_id, call.caller)
        read = partial(sandbox.read, query.path, max_bytes=query.max_bytes, user=query.user)
        content = await within(FILE_S, read)
        await respond(call.send, content, content_type=table.BINARY.encode())

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
        folders, sandbox = self._require_folders(), self._access.find(query.sandbox_id, call.caller)
        tenant = call.caller.tenant
        await folders.download(sandbox, query.path, query.user, query.max_bytes, call.send, tenant=tenant)

    @handles_http(table.UPLOAD_TREE)
    async def upload_tree(self, query: files.UploadTree, call: HttpCall) -> CallOutcome:
        """Upload a tar stream with one file, link or folder, which is stored at `path` in the sandbox."""
        folders, sandbox = self._require_folders(), self._access.find(query.sandbox_id, call.caller)
        await folders.upload(sandbox, query.path, query.user, call.receive, tenant=call.caller.tenant)
        return CallOutcome(write(DoneReply()))

    @handles_http(table.POOL_EVENTS)
    async def events(self, query: wire.EventsQuery, call: HttpCall) -> None:
        """Stream the events of sandboxes as server-sent events, with a heartbeat every 15 s.

        The data of each event is a `PoolEvent`.
        """
        self._access.refuse_when_closing()
        last = next((value for name, value in call.scope["headers"] if name == b"last-event-id"), b"")
        after = max(query.after, int(last) if last.isdigit() else 0)
        tenant = call.caller.visible_tenant
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
        await call.send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(cancel_on_disconnect, call.receive, tasks.cancel_scope)
                tasks.start_soon(self._access.cancel_when_closing, tasks.cancel_scope)
                tasks.start_soon(_send_heartbeats, call.send)
                async for event in self._access.pool.events(after=after):
                    if tenant in (None, event.tenant):
                        body = _encode(event, call.caller)
                        await call.send({"type": "http.response.body", "body": body, "more_body": True})
                tasks.cancel_scope.cancel()
            await call.send({"type": "http.response.body", "body": b""})
        except* OSError:
            # The caller has disconnected. The server ends the incomplete response.
            pass

    def _require_folders(self) -> FolderTransfers:
        if self._folders is None:
            raise UnsupportedError("this server does not support uploads and downloads of folders")
        return self._folders


async def _send_heartbeats(send: Send) -> None:
    while True:
        await anyio.sleep(HEARTBEAT_S)
        await send({"type": "http.response.body", "body": b": alive\n\n", "more_body": True})


def _encode(event: PoolEvent, caller: Caller) -> bytes:
    name = event.sandbox_id and caller.name(TenantKey(event.tenant, event.sandbox_id))
    kind = "".join(one for one in event.kind if one.isprintable())
    return b"id: %d\nevent: %b\ndata: %b\n\n" % (event.number, kind.encode(), write(replace(event, sandbox_id=name)))
