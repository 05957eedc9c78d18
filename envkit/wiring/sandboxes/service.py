"""The operations of ``envkit sandbox`` on sandboxes of this machine or of a server."""

from __future__ import annotations

import sys
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from envkit import clock
from envkit.errors import EnvkitError, UsageError
from envkit.sandbox.bubblewrap import backend as bubblewrap
from envkit.sandbox.bubblewrap.backend import LocalBackend
from envkit.sandbox.bubblewrap.supervisor import find_orphans, reap_orphans
from envkit.sandbox.docker import backend as docker
from envkit.sandbox.docker import orphans as docker_orphans
from envkit.sandbox.docker.api import Daemon
from envkit.sandbox.docker.backend import DockerBackend
from envkit.sandbox.host import cgroups, run_dirs
from envkit.sandbox.transfer import tar_stream
from envkit.types import JSON
from envkit.wiring.sandboxes.backends import BackendKind
from envkit.wiring.sandboxes.blocking import AnySandbox, kind_of, opened, running, spec_of

if TYPE_CHECKING:
    from envkit.http.client.sandbox_client import SandboxClient

_LONGEST_S = 10 * 365 * 86400.0
"""Default timeout of a program in a sandbox of this machine, in seconds."""


@dataclass(frozen=True, slots=True)
class SandboxService:
    """The sandboxes of this machine, or of the server at `url`.

    The server stops a detached sandbox after its time to live, or an hour without use.
    Without a token file, the variable ``ENVKIT_TOKEN`` is used, if it is set. `kind` is that of new sandboxes here.
    """

    kind: BackendKind = "auto"
    url: str | None = None
    token_file: Path | None = None
    ca: Path | None = None

    async def detach(
        self,
        options: Mapping[str, Any],
        program: Sequence[str],
        uploads: Sequence[tuple[Path, str]],
        report_id: Callable[[str], None],
    ) -> None:
        """Start a detached sandbox that runs `program`, copy `uploads` into it, and call `report_id` with its id."""
        if uploads and program:
            raise UsageError(
                "--upload: with --detach the program would start before the upload; leave the program out here, and "
                "run it with envkit sandbox exec"
            )
        spec = spec_of({**options, "command": program})
        async with AsyncExitStack() as parts, AsyncExitStack() as undo:
            sandbox: AnySandbox
            if self.url is not None:
                client = await parts.enter_async_context(self.client())
                sandbox = client.get(f"sandbox-{uuid.uuid4().hex[:12]}")
                undo.push_async_callback(sandbox.stop)
                await client.create(sandbox.id, replace(spec, detached=False))
            else:
                backend = await parts.enter_async_context(opened(self.kind))
                sandbox = await backend.start(spec)
                undo.push_async_callback(sandbox.stop)
            for source, name in uploads:
                await sandbox.upload(source, name)
            report_id(sandbox.id)
            undo.pop_all()

    async def remove(self, ids: Sequence[str]) -> None:
        """Stop detached sandboxes and delete their files. If one cannot be stopped, the others are still stopped.

        Raises:
            ExceptionGroup: The errors of the sandboxes that could not be stopped.
        """
        failures = []
        for id in ids:
            try:
                if self.url is not None:
                    async with self.client() as client:
                        await client.view(id)
                        await client.stop(id)
                else:
                    async with _backend_of(id) as backend:
                        await backend.remove(id)
            except EnvkitError as error:
                failures.append(error)
        if failures:
            raise ExceptionGroup("cannot end sandboxes", failures)

    @asynccontextmanager
    async def client(self) -> AsyncIterator[SandboxClient]:
        """Connect to the server for the duration of an ``async with`` block."""
        from envkit.http.client.connect import read_token  # imported late: this machine's sandboxes need no client
        from envkit.http.client.sandbox_client import SandboxClient

        assert self.url is not None
        token = None if self.token_file is None else read_token(self.token_file, partial(print, file=sys.stderr))
        async with SandboxClient(self.url, token, ca=self.ca, folder_transport=tar_stream) as client:
            yield client

    @property
    def longest_s(self) -> float:
        """Maximum timeout of a program in seconds."""
        if self.url is None:
            return _LONGEST_S
        from envkit.http.sandboxes.access import MAX_TIMEOUT_S

        return MAX_TIMEOUT_S

    @asynccontextmanager
    async def running(self, options: Mapping[str, Any]) -> AsyncIterator[AnySandbox]:
        """Run a new sandbox for the duration of an ``async with`` block."""
        spec = spec_of(options)
        if self.url is not None:
            async with self.client() as client, client.lease(spec) as sandbox:
                yield sandbox
        else:
            async with opened(self.kind) as backend, running(backend, spec) as sandbox:
                yield sandbox

    @asynccontextmanager
    async def attached(self, id: str) -> AsyncIterator[AnySandbox]:
        """Connect to a detached sandbox for the duration of an ``async with`` block."""
        if self.url is not None:
            async with self.client() as client:
                await client.view(id)  # raises if there is no such id, but not if the sandbox has ended
                yield client.get(id)
        else:
            async with _backend_of(id) as backend:
                yield await backend.attach(id)


@asynccontextmanager
async def _backend_of(id: str) -> AsyncIterator[LocalBackend | DockerBackend]:
    """Open the backend that created the sandbox with this id."""
    async with opened(kind_of(id)) as backend:
        assert isinstance(backend, (LocalBackend, DockerBackend))
        yield backend


class DetachedSandbox(NamedTuple):
    """A detached sandbox, which outlives the command that started it. If it does not answer, `problem` says why."""

    id: str
    stats: Mapping[str, JSON]
    problem: str
    of_server: bool


async def list_detached_sandboxes(*, with_servers: bool, warn: Callable[[str], None]) -> Sequence[DetachedSandbox]:
    """Return the detached sandboxes on this machine, of all backends that work here; `with_servers`, those of servers.

    `warn` is called with one line about each backend that is skipped.
    """
    found: list[DetachedSandbox] = []
    if bubblewrap.why_unavailable() is None:
        async with LocalBackend() as backend:
            found += await _detached(backend, with_servers)
    if await _has_docker(warn):
        async with DockerBackend() as backend:
            found += await _detached(backend, with_servers)
    return found


async def _has_docker(warn: Callable[[str], None]) -> bool:
    if (why := await docker.why_unavailable()) is not None:
        warn(f"docker was left out: {why}")
    return why is None


async def _detached(backend: LocalBackend | DockerBackend, with_servers: bool) -> Sequence[DetachedSandbox]:
    own, found = await backend.list_detached(""), []
    for id in sorted(await backend.list_detached() if with_servers else own):
        stats, problem = dict[str, JSON](), ""
        try:
            sandbox = await backend.attach(id, as_observer=True)
            stats = await sandbox.stats()
            await sandbox.release()
        except EnvkitError as error:
            problem = str(error)
        found.append(DetachedSandbox(id, stats, problem, id not in own))
    return found


async def prune(*, dry_run: bool, warn: Callable[[str], None]) -> Sequence[str]:
    """Remove processes, control groups, folders and containers of sandboxes whose envkit process has ended.

    Detached sandboxes are not removed. Returns one line per removed object.

    Args:
        dry_run: Whether to remove nothing, and only return what would be removed.
        warn: Called with one line about each backend that is skipped.
    """
    done = await clock.to_thread(_prune_here, dry_run)
    if await _has_docker(warn):
        async with aclosing(await Daemon.connect()) as daemon:
            found = await docker_orphans.gone(daemon) if dry_run else await docker_orphans.reap(daemon)
        done += [f"{kind} {id}" for kind, id in found]
    return done


def _prune_here(dry_run: bool) -> list[str]:
    done = []
    if sys.platform == "linux":
        for group in cgroups.gone(cgroups.find()):
            done.append(f"control group {group.name}")
            if not dry_run:
                group.kill()
                group.remove()
        done += [f"process {pid}" for pid in (find_orphans() if dry_run else reap_orphans())]
    return done + [f"folder {folder}" for folder in (run_dirs.gone() if dry_run else run_dirs.reap())]
