"""The sandboxes of this machine, for ``envkit sandbox``."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import ClassVar

from envkit.errors import EnvkitError
from envkit.sandbox.bubblewrap import backend as bubblewrap
from envkit.sandbox.bubblewrap.backend import LocalBackend
from envkit.sandbox.docker import backend as docker
from envkit.sandbox.docker.backend import DockerBackend
from envkit.types import JSON, SandboxSpec
from envkit.wiring.sandboxes import running_servers
from envkit.wiring.sandboxes.backends import BackendKind
from envkit.wiring.sandboxes.blocking import AnySandbox, kind_of, opened, running
from envkit.wiring.sandboxes.running_servers import ServerNote
from envkit.wiring.sandboxes.service import SandboxService

_NO_OWNER: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class LocalService(SandboxService):
    """The sandboxes of this machine. `kind` is the kind of backend for new sandboxes."""

    max_timeout_s: ClassVar[float] = 10 * 365 * 86400.0

    kind: BackendKind = "auto"

    @asynccontextmanager
    async def running(self, spec: SandboxSpec) -> AsyncIterator[AnySandbox]:
        async with opened(self.kind) as backend, running(backend, spec) as sandbox:
            yield sandbox

    @asynccontextmanager
    async def start_detached(self, spec: SandboxSpec) -> AsyncIterator[AnySandbox]:
        async with opened(self.kind) as backend:
            sandbox = await backend.start(spec)
            try:
                yield sandbox
            except BaseException:
                await sandbox.stop()
                raise

    @asynccontextmanager
    async def attached(self, id: str) -> AsyncIterator[AnySandbox]:
        async with _backend_of(id) as backend:
            yield await backend.attach(id)

    async def stop(self, id: str) -> None:
        async with _backend_of(id) as backend:
            await backend.remove(id)


@dataclass(frozen=True, slots=True)
class DetachedSandbox:
    """A detached sandbox, as `envkit sandbox ls` lists it. It outlives the command that started it.

    Attributes:
        id: Id of the sandbox.
        stats: See `envkit.sandbox.agent_client.sandbox.AgentSandbox.stats`; empty if the sandbox does not answer.
        problem: Why the sandbox does not answer, in one line; empty if it answers.
        owner: Process, address and ledger of the server that started the sandbox; empty if no server started it.
    """

    id: str
    stats: Mapping[str, JSON]
    problem: str = ""
    owner: Sequence[str] = ()


async def list_detached_sandboxes(*, with_servers: bool, warn: Callable[[str], None]) -> Sequence[DetachedSandbox]:
    """Return the detached sandboxes on this machine, of all backends that work here.

    Args:
        with_servers: Whether to include the sandboxes of `envkit serve`.
        warn: Called with one line about each backend that is skipped.
    """
    found: list[DetachedSandbox] = []
    if bubblewrap.why_unavailable() is None:
        async with LocalBackend() as backend:
            found += await _detached(backend, with_servers)
    if (why := await docker.why_unavailable()) is None:
        async with DockerBackend() as backend:
            found += await _detached(backend, with_servers)
    else:
        warn(f"docker was left out: {why}")
    return found


async def _detached(backend: LocalBackend | DockerBackend, with_servers: bool) -> Sequence[DetachedSandbox]:
    owners = dict.fromkeys(await backend.list_detached(""), _NO_OWNER)
    if with_servers:
        for note in running_servers.known():
            owners |= dict.fromkeys(await backend.list_detached(note.ledger_id), _owner(note))
        owners = dict.fromkeys(await backend.list_detached(), ("of an unknown server",)) | owners
    return [await _inspect(backend, sandbox_id, owner) for sandbox_id, owner in sorted(owners.items())]


def _owner(note: ServerNote) -> Sequence[str]:
    return f"of server {note.pid}{', which has ended' if note.is_gone() else ''}", note.address, note.ledger


async def _inspect(backend: LocalBackend | DockerBackend, sandbox_id: str, owner: Sequence[str]) -> DetachedSandbox:
    try:
        sandbox = await backend.attach(sandbox_id, as_observer=True)
        stats = await sandbox.stats()
        await sandbox.release()
    except EnvkitError as error:
        return DetachedSandbox(sandbox_id, {}, str(error), owner)
    return DetachedSandbox(sandbox_id, stats, owner=owner)


@asynccontextmanager
async def _backend_of(id: str) -> AsyncIterator[LocalBackend | DockerBackend]:
    """Open the backend that created the sandbox with this id."""
    async with opened(kind_of(id)) as backend:
        assert isinstance(backend, (LocalBackend, DockerBackend))
        yield backend
