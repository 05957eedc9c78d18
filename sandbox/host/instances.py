"""The live sandboxes of one backend: ids, directories, checks of specs, and cleanup."""

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
from .validation import fault_of_variables, fault_of_words
from .views import fault_of_views

_OWN_ENDS = frozenset({CauseKind.EXITED, CauseKind.KILLED, CauseKind.EXPIRED, CauseKind.ORPHANED})
"""Kinds of a sandbox's own end, not its node's or backend's. Out of memory counts only at its own limit."""
_MIN_CPUS, _MAX_CPUS = 0.01, 1 << 20
"""The kernel's smallest quota is 1 ms of 100."""


class Stoppable(Protocol):
    """A sandbox, as its backend sees it."""

    async def stop(self) -> None: ...


class LiveSandboxes:
    """Sandboxes that a backend started and has not removed yet, and the run directory for them.

    Args:
        kind: First part of the ids.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._started = 0
        self._folder: Path | None = None
        self._sandboxes: set[Stoppable] = set()

    @property
    def folder(self) -> Path:
        """The run directory, mode 0700.

        Raises:
            SandboxError: The backend is not open.
        """
        if self._folder is None:
            raise SandboxError("the backend is not open; use 'async with'")
        return self._folder

    async def open(self) -> None:
        """Remove what earlier owners left and make the run directory."""
        await clock.to_thread(run_dirs.reap)
        self._folder = run_dirs.new_run_folder()

    async def close(self) -> None:
        """Stop all sandboxes and remove the run directory; not cancelled.

        Raises:
            SandboxError: A sandbox could not be stopped; the others are.
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
        """Return the free and the required space, MiB, of the run directory's disk, keyed by the disk's name."""
        free_mib = shutil.disk_usage(self.folder).free >> 20
        return {f"the disk of {self.folder.parent}": (free_mib, run_dirs.LEAST_FREE_MIB)}

    def new_id(self) -> str:
        """Return the next id, such as ``"bwrap-1"``.

        Raises:
            SandboxError: The backend is not open.
        """
        if self._folder is None:
            raise SandboxError("the backend is not open; use 'async with'")
        self._started += 1
        return f"{self._kind}-{self._started}"

    def new_folder(self, sandbox_id: str) -> Path:
        """Make and return the sandbox's directory, mode 0700."""
        made = self.folder / sandbox_id
        made.mkdir(mode=0o700)
        return made

    def add(self, sandbox: Stoppable) -> None:
        """Stop `sandbox` on `close`, unless it is forgotten before."""
        self._sandboxes.add(sandbox)

    def forget(self, sandbox: Stoppable) -> None:
        """Remove `sandbox` from the set: nothing is left of it."""
        self._sandboxes.discard(sandbox)


def not_ready(sandbox_id: str, cause: Cause) -> SandboxStartError:
    """Return the error for a sandbox that ended before it was ready.

    Args:
        sandbox_id: Its id.
        cause: Why it ended; only its own end is an error of the spec, not an end of its node or backend.
    """
    is_own = cause.kind in _OWN_ENDS or (cause.kind is CauseKind.OUT_OF_MEMORY and cause.by_agent)
    return (SandboxEndedError if is_own else SandboxStartError)(sandbox_id, cause)


def machine_memory_mib() -> int:
    """Return the memory of this machine, MiB."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20


def refuse(
    sandbox_id: str,
    spec: SandboxSpec,
    capabilities: Mapping[str, bool],
    *,
    memory_mib: int | None = None,
    shown: Iterable[str] = (),
) -> None:
    """Refuse a spec that this backend cannot enforce.

    Args:
        sandbox_id: Id for the error.
        spec: The spec.
        capabilities: What is enforced, see `envkit.protocols.SandboxBackend.capabilities`.
        memory_mib: Memory of the machine, which also holds what sandboxes write; None if unknown.
        shown: Paths inside that views must not cover.

    Raises:
        SandboxRefusedError: The spec is invalid or asks for something that is not enforced; names it.
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
            sandbox_id, f"untrusted programs are refused: not enforced here: {', '.join(missing)}"
        )
    asked = {
        "memory": ("memory_mib", spec.memory_mib),
        "pids": ("pids", spec.pids),
        "cpu": ("cpus", spec.cpus),
        "disk": ("disk_mib", spec.disk_mib),
        "network": ("network", spec.network if isinstance(spec.network, tuple) else None),
    }
    for name, (field, value) in asked.items():
        if isinstance(value, (int, float)) and not value > 0:  # the kernel or daemon would take it as unlimited
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
