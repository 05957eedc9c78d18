"""What ``envkit sandbox`` does with the sandboxes of a server."""

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
from envkit.http.sandboxes.lookup import MAX_TIMEOUT_S
from envkit.sandbox.transfer import tar_stream
from envkit.types import SandboxView
from envkit.wiring.sandboxes.blocking import spec_of
from envkit.wiring.sandboxes.local_service import exit_code_of, say


@dataclass(frozen=True, slots=True)
class RemoteServer:
    """Where a server is and how it is entered.

    Attributes:
        url: Its address.
        token_file: File that holds a token; None for the variable ``ENVKIT_TOKEN``, if there is one.
        ca: PEM file of the certificates to trust it by; None for the system's.
    """

    url: str
    token_file: Path | None = None
    ca: Path | None = None

    @asynccontextmanager
    async def client(self) -> AsyncIterator[SandboxClient]:
        """Give a client for the length of the block."""
        async with SandboxClient(self.url, self._token(), ca=self.ca, trees=tar_stream) as client:
            yield client

    def _token(self) -> str | None:
        if self.token_file is None:
            return None
        try:
            if self.token_file.stat().st_mode & 0o044:
                said = f"others can read {self.token_file}, which holds a token: chmod go-rwx {self.token_file}"
                print(said, file=sys.stderr)
            return self.token_file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"no token can be read from {self.token_file}: {error}") from None


async def run(
    server: RemoteServer,
    options: Mapping[str, Any],
    program: Sequence[str],
    uploads: Sequence[tuple[Path, str]],
    timeout_s: float | None,
) -> int:
    """Run a program in a new sandbox of a server, without input, and return the exit code to end with."""
    _require(program)
    spec = spec_of(options)
    bound_s = timeout_s or MAX_TIMEOUT_S

    async def run() -> int:
        async with server.client() as client, client.lease(spec) as box:
            await _upload(box, uploads)
            _announce()
            return say(await box.exec(program, timeout_s=bound_s), bound_s)

    return await exit_code_of(run)


async def detach(
    server: RemoteServer,
    options: Mapping[str, Any],
    program: Sequence[str],
    uploads: Sequence[tuple[Path, str]],
    tell: Callable[[str], None],
) -> None:
    """Leave a sandbox of a server running in which `program` runs, and tell its name.

    It ends by its own time to live, or when nobody uses it for an hour.
    """
    if uploads and program:
        raise UsageError("--upload goes with --detach only without a program, which would start before: use exec then")
    spec = spec_of({**options, "command": program, "detached": False})
    async with server.client() as client:
        name = f"box-{uuid.uuid4().hex[:12]}"
        try:
            await client.create(name, spec)
            await _upload(client.get(name), uploads)
        except BaseException:
            await client.stop(name)
            raise
        tell(name)


async def exec_in(server: RemoteServer, id: str, program: Sequence[str], timeout_s: float | None) -> int:
    """Run a program in a sandbox of a server, without input, and return the exit code to end with."""
    _require(program)
    bound_s = timeout_s or MAX_TIMEOUT_S

    async def run() -> int:
        async with server.client() as client:
            await client.view(id)  # raises for one that never was; one that has ended is lost
            _announce()
            return say(await client.get(id).exec(program, timeout_s=bound_s), bound_s)

    return await exit_code_of(run)


async def log_of(server: RemoteServer, id: str) -> str:
    """Return the end of what the command of a sandbox wrote to standard error."""
    async with server.client() as client:
        await client.view(id)
        return await client.get(id).log()


async def remove(server: RemoteServer, ids: Sequence[str]) -> None:
    """End sandboxes of a server; those that cannot be ended do not keep the others from it.

    Raises:
        ExceptionGroup: Of what went wrong.
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
        raise ExceptionGroup("sandboxes that could not be ended", failures)


async def views(server: RemoteServer) -> list[SandboxView]:
    """Return the sandboxes of a server, oldest first."""
    async with server.client() as client:
        return await client.views()


async def snapshots(server: RemoteServer) -> list[KeptReply]:
    """Return the snapshots of a server, oldest first."""
    async with server.client() as client:
        return await client.snapshots()


async def remove_snapshots(server: RemoteServer, names: Sequence[str]) -> None:
    """Remove snapshots of a server."""
    async with server.client() as client:
        for name in names:
            await client.remove_snapshot(name)


async def _upload(box: RemoteSandbox, uploads: Sequence[tuple[Path, str]]) -> None:
    for source, name in uploads:
        await box.upload(source, name)


def _announce() -> None:
    """Print to standard error why a program on a server shows no output yet."""
    print("running on the server without standard input; output is printed when the program ends", file=sys.stderr)


def _require(program: Sequence[str]) -> None:
    if not program:
        raise UsageError("a program is needed: there is no shell of your own in a remote sandbox")
