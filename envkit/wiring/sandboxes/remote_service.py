"""Implementation of ``envkit sandbox --url``, which runs programs in the sandboxes of a server."""

from __future__ import annotations

import sys
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envkit.errors import EnvkitError, UsageError
from envkit.http.client.remote_sandbox import RemoteSandbox
from envkit.http.client.sandbox_client import SandboxClient
from envkit.http.protocol.sandbox_messages import KeptReply
from envkit.http.sandboxes.access import MAX_TIMEOUT_S
from envkit.sandbox.transfer import tar_stream
from envkit.types import SandboxView
from envkit.wiring.sandboxes.blocking import spec_of
from envkit.wiring.sandboxes.local_service import UPLOADS_AFTER_START, exit_code_of, run_attached


@dataclass(frozen=True, slots=True)
class RemoteServer:
    """Address and credentials of a server.

    Attributes:
        url: Address of the server.
        token_file: File that contains a token; None uses the environment variable ``ENVKIT_TOKEN``, if it is set.
        ca: PEM file with the CA certificates to trust; None trusts the system's CA certificates.
    """

    url: str
    token_file: Path | None = None
    ca: Path | None = None

    @asynccontextmanager
    async def client(self) -> AsyncIterator[SandboxClient]:
        """Open a client of the server, and close it when the ``with`` block ends."""
        async with SandboxClient(self.url, self._token(), ca=self.ca, folder_transport=tar_stream) as client:
            yield client

    def _token(self) -> str | None:
        if self.token_file is None:
            return None
        try:
            if self.token_file.stat().st_mode & 0o044:
                warning = f"other users can read the token file {self.token_file}; run: chmod go-rwx {self.token_file}"
                print(warning, file=sys.stderr)
            return self.token_file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"cannot read a token from {self.token_file}: {error}") from None


async def run(
    server: RemoteServer,
    options: Mapping[str, Any],
    program: Sequence[str],
    uploads: Sequence[tuple[Path, str]],
    timeout_s: float | None,
    tty: bool,
) -> int:
    """Run a program (a shell if `program` is empty) in a new sandbox of a server; return the exit code to exit with."""
    spec = spec_of(options)

    async def run() -> int:
        async with server.client() as client, client.lease(spec) as sandbox:
            await _upload(sandbox, uploads)
            return await run_attached(sandbox, program, timeout_s or MAX_TIMEOUT_S, tty)

    return await exit_code_of(run)


async def detach(
    server: RemoteServer,
    options: Mapping[str, Any],
    program: Sequence[str],
    uploads: Sequence[tuple[Path, str]],
    report_id: Callable[[str], None],
) -> None:
    """Start a sandbox that runs `program` on a server, and report the id of the sandbox.

    The server stops the sandbox after its time to live, or after an hour without use.
    """
    if uploads and program:
        raise UsageError(UPLOADS_AFTER_START)
    spec = spec_of({**options, "command": program, "detached": False})
    async with server.client() as client:
        name = f"sandbox-{uuid.uuid4().hex[:12]}"
        try:
            await client.create(name, spec)
            await _upload(client.get(name), uploads)
        except BaseException:
            await client.stop(name)
            raise
        report_id(name)


async def exec_in(server: RemoteServer, id: str, program: Sequence[str], timeout_s: float | None, tty: bool) -> int:
    """Run a program (a shell if `program` is empty) in a sandbox of a server; return the exit code to exit with."""

    async def run() -> int:
        async with server.client() as client:
            await client.view(id)  # raises if the id is unknown; an ended sandbox raises SandboxLostError below
            return await run_attached(client.get(id), program, timeout_s or MAX_TIMEOUT_S, tty)

    return await exit_code_of(run)


async def log_of(server: RemoteServer, id: str) -> str:
    """Return the last standard error output of a sandbox's command."""
    async with server.client() as client:
        await client.view(id)
        return await client.get(id).log()


async def remove(server: RemoteServer, ids: Sequence[str]) -> None:
    """Stop sandboxes of a server. If one of them cannot be stopped, still stop the others.

    Raises:
        ExceptionGroup: Some sandboxes could not be stopped; contains one exception for each.
    """
    failures = []
    async with server.client() as client:
        for id in ids:
            try:
                await client.view(id)
                await client.stop(id)
            except EnvkitError as error:
                failures.append(error)
    if failures:
        raise ExceptionGroup("cannot end sandboxes", failures)


async def views(server: RemoteServer) -> list[SandboxView]:
    """Return the sandboxes of a server, oldest first."""
    async with server.client() as client:
        return await client.views()


async def snapshots(server: RemoteServer) -> list[KeptReply]:
    """Return the snapshots of a server, oldest first."""
    async with server.client() as client:
        return await client.snapshots()


async def remove_snapshots(server: RemoteServer, names: Sequence[str]) -> None:
    """Remove snapshots from a server."""
    async with server.client() as client:
        for name in names:
            await client.remove_snapshot(name)


async def _upload(sandbox: RemoteSandbox, uploads: Sequence[tuple[Path, str]]) -> None:
    for source, name in uploads:
        await sandbox.upload(source, name)
