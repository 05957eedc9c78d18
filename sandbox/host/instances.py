"""The live sandboxes of one backend: assigns ids and directories, checks specs, and stops all sandboxes at the end."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

import anyio

from envkit import clock
from envkit.errors import SandboxEndedError, SandboxError, SandboxRefusedError, SandboxStartError
from envkit.types import Cause, CauseKind, SandboxSpec

from . import run_dirs
from .validation import fault_of_variables, fault_of_views, fault_of_words

_OWN_ENDS = frozenset({CauseKind.EXITED, CauseKind.KILLED, CauseKind.EXPIRED, CauseKind.ORPHANED})
"""Kinds of causes that lie in the sandbox, not in its node or backend. `OUT_OF_MEMORY` can lie in either."""
_MIN_CPUS, _MAX_CPUS = 0.01, 1 << 20
"""The minimum is the smallest CPU quota of the kernel: 1 ms per period of 100 ms."""


class Stoppable(Protocol):
    """A sandbox that its backend can stop."""

    async def stop(self) -> None: ...


class LiveSandboxes:
    """The sandboxes that a backend has started and not yet stopped, and the run directory for their files."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._started = 0
        self._folder: Path | None = None
        self._sandboxes: set[Stoppable] = set()

    @property
    def folder(self) -> Path:
        """The run directory; see `envkit.sandbox.host.run_dirs`.

        Raises:
            SandboxError: The backend is not open.
        """
        if self._folder is None:
            raise SandboxError("the backend is not open; use 'async with'")
        return self._folder

    async def open(self) -> None:
        """Create a run directory for this backend. Before that, remove those of processes that have ended."""
        await clock.to_thread(run_dirs.reap)
        self._folder = run_dirs.new_run_folder()

    async def close(self) -> None:
        """Stop all sandboxes and remove the run directory; cannot be cancelled.

        Raises:
            SandboxError: Some sandboxes could not be stopped. All others have been stopped.
        """
        failures: list[SandboxError] = []
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as tasks:
                for sandbox in list(self._sandboxes):
                    tasks.start_soon(_stop, sandbox, failures)
            if self._folder is not None:
                await clock.to_thread(run_dirs.remove, self._folder)
                self._folder = None
        if failures:
            raise SandboxError("; ".join(str(failure) for failure in failures))

    def disks(self) -> dict[str, tuple[int, int]]:
        """Return, by a name for the disk of the run directory, its free MiB and the MiB that must stay free."""
        free_mib = shutil.disk_usage(self.folder).free >> 20
        return {f"the disk of {self.folder.parent}": (free_mib, run_dirs.LEAST_FREE_MIB)}

    def new_id(self) -> str:
        """Return the id for a new sandbox, such as ``"bwrap-1"``; raises the same error as `folder`."""
        _ = self.folder
        self._started += 1
        return f"{self._kind}-{self._started}"

    def add(self, sandbox: Stoppable) -> None:
        """Add a sandbox, which `close` will stop."""
        self._sandboxes.add(sandbox)

    def forget(self, sandbox: Stoppable) -> None:
        """Remove a sandbox that has been stopped, so that `close` does not stop it again."""
        self._sandboxes.discard(sandbox)


def not_ready(sandbox_id: str, cause: Cause) -> SandboxStartError:
    """Return the error for a sandbox that ended before it was ready."""
    is_own = cause.kind in _OWN_ENDS or (cause.kind is CauseKind.OUT_OF_MEMORY and cause.by_agent)
    return (SandboxEndedError if is_own else SandboxStartError)(sandbox_id, cause)


def machine_memory_mib() -> int:
    """Return the memory of this machine in MiB."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20


def refuse(
    sandbox_id: str,
    spec: SandboxSpec,
    capabilities: Mapping[str, bool],
    *,
    memory_mib: int | None = None,
    shown: Iterable[str] = (),
) -> None:
    """Raise an error if a spec is invalid, or requires a limit that the backend does not enforce.

    Args:
        sandbox_id: Id of the sandbox, for the error message.
        spec: Spec to check.
        capabilities: Limits that the backend enforces; see `envkit.protocols.SandboxBackend.capabilities`.
        memory_mib: Memory of the machine in MiB, which `memory_mib` and `disk_mib` of the spec must not exceed (files
            are kept in memory); None if unknown.
        shown: Paths inside the sandbox that are in use, so that views must not overlap them.

    Raises:
        SandboxRefusedError: The spec is refused. The message names the field.
    """
    profile: str = spec.profile
    if profile not in ("strict", "system"):
        raise SandboxRefusedError(
            sandbox_id, f"profile={profile!r} is refused: use 'strict' or 'system'", everywhere=True
        )
    if (fault := fault_of_words(spec.command)) is not None:
        raise SandboxRefusedError(sandbox_id, f"command={spec.command!r} is refused: {fault}", everywhere=True)
    if (fault := fault_of_variables(spec.env)) is not None:
        raise SandboxRefusedError(sandbox_id, f"env is refused: {fault}", everywhere=True)
    if (fault := fault_of_views(spec.views, shown)) is not None:
        raise SandboxRefusedError(sandbox_id, f"views is refused: {fault}")
    if spec.untrusted and (missing := [name for name, holds in capabilities.items() if not holds]):
        raise SandboxRefusedError(
            sandbox_id,
            f"untrusted programs are refused: this backend does not enforce {', '.join(missing)}; "
            "envkit doctor says how it could",
        )
    asked = {
        "memory": ("memory_mib", spec.memory_mib),
        "pids": ("pids", spec.pids),
        "cpu": ("cpus", spec.cpus),
        "disk": ("disk_mib", spec.disk_mib),
        "network": ("network", spec.network if isinstance(spec.network, tuple) else None),
    }
    for name, (field, value) in asked.items():
        if isinstance(value, (int, float)) and not value > 0:  # for the kernel and Docker, 0 would mean no limit
            raise SandboxRefusedError(
                sandbox_id, f"{field}={value} is refused: it must be more than 0", everywhere=True
            )
        if value is not None and not capabilities[name]:
            raise SandboxRefusedError(sandbox_id, f"{field}={value} is refused: this backend cannot limit {name}")
    if spec.cpus is not None and not _MIN_CPUS <= spec.cpus <= _MAX_CPUS:
        cause = f"cpus={spec.cpus} is refused: it must be in [{_MIN_CPUS}, {_MAX_CPUS}]"
        raise SandboxRefusedError(sandbox_id, cause, everywhere=True)
    in_memory = {"memory_mib": spec.memory_mib, "disk_mib": None if profile == "system" else spec.disk_mib}
    for field, asked_mib in in_memory.items():
        if memory_mib is not None and asked_mib is not None and asked_mib > memory_mib:
            cause = f"{field}={asked_mib} is refused: the machine has {memory_mib} MiB of memory"
            raise SandboxRefusedError(sandbox_id, cause + ", and files are in memory" * (field == "disk_mib"))


async def _stop(sandbox: Stoppable, failures: list[SandboxError]) -> None:
    try:
        await sandbox.stop()
    except SandboxError as error:
        failures.append(error)
