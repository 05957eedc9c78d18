"""The boxes of one backend: their ids and folders, what none of them may ask for, and that none is left."""

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
"""How a sandbox ends by itself, as opposed to its node or backend; out of memory only at its own limit."""
_LEAST_CPUS, _MOST_CPUS = 0.01, 1 << 20
"""The kernel's smallest quota is 1 ms of 100."""


class Stoppable(Protocol):
    """A box, as far as its backend must know it."""

    async def stop(self) -> None: ...


class LiveSandboxes:
    """The boxes that a backend has started and not yet forgotten, and the folder that holds theirs.

    Args:
        kind: First part of the ids.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._started = 0
        self._folder: Path | None = None
        self._boxes: set[Stoppable] = set()

    @property
    def folder(self) -> Path:
        """The folder of this run, mode 0700.

        Raises:
            SandboxError: The backend is not open.
        """
        if self._folder is None:
            raise SandboxError("the backend is not open; use 'async with'")
        return self._folder

    async def open(self) -> None:
        """Clear away what earlier owners left, and make the folder."""
        await clock.to_thread(run_dirs.reap)
        self._folder = run_dirs.new_run_folder()

    async def close(self) -> None:
        """Stop what still runs and remove the folder; not cancelled.

        Raises:
            SandboxError: A box could not be ended; the others are.
        """
        failures: list[SandboxError] = []
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as tasks:
                for box in list(self._boxes):
                    tasks.start_soon(_stop, box, failures)
            if self._folder is not None:
                await clock.to_thread(run_dirs.remove, self._folder)
                self._folder = None
        if failures:
            raise SandboxError("; ".join(str(failure) for failure in failures))

    def disks(self) -> dict[str, tuple[int, int]]:
        """Return, by the name of the disk that the folder is on, the MiB that it has free, and those that must be."""
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
        """Make and return the box's folder, mode 0700."""
        made = self.folder / sandbox_id
        made.mkdir(mode=0o700)
        return made

    def add(self, box: Stoppable) -> None:
        """Stop `box` at the end, unless it is forgotten before."""
        self._boxes.add(box)

    def forget(self, box: Stoppable) -> None:
        """Nothing is left of `box`."""
        self._boxes.discard(box)


def not_ready(sandbox_id: str, cause: Cause) -> SandboxStartError:
    """Return what is raised where a box came up and was gone before it was ready.

    Args:
        sandbox_id: Which one.
        cause: Why it is gone; only an end of its own lies in what was asked for, and not one of the way to it.
    """
    is_own = cause.kind in _OWN_ENDS or (cause.kind is CauseKind.OUT_OF_MEMORY and cause.by_agent)
    return (SandboxEndedError if is_own else SandboxStartError)(sandbox_id, cause)


def machine_memory_mib() -> int:
    """Return how much memory this machine has, MiB."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20


def refuse(
    sandbox_id: str,
    spec: SandboxSpec,
    capabilities: Mapping[str, bool],
    *,
    memory_mib: int | None = None,
    shown: Iterable[str] = (),
) -> None:
    """Refuse what cannot be held.

    Args:
        sandbox_id: Who asks.
        spec: What it asks for.
        capabilities: What is enforced, see `envkit.protocols.SandboxBackend.capabilities`.
        memory_mib: How much memory the machine has, in which lies what is written too; None where that is not known.
        shown: Places inside that views must not cover.

    Raises:
        SandboxRefusedError: The spec asks for more than that, and says what.
    """
    profile: str = spec.profile
    if profile not in ("strict", "system"):
        raise SandboxRefusedError(
            sandbox_id, f"profile={profile!r} is refused: it must be 'strict' or 'system'", everywhere=True
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
        if isinstance(value, (int, float)) and not value > 0:  # to a kernel or daemon it would mean: without bound
            raise SandboxRefusedError(
                sandbox_id, f"{field}={value} is refused: it must be more than 0", everywhere=True
            )
        if value is not None and not capabilities[name]:
            raise SandboxRefusedError(sandbox_id, f"{field}={value} is refused: {name} is not bounded here")
    if spec.cpus is not None and not _LEAST_CPUS <= spec.cpus <= _MOST_CPUS:
        cause = f"cpus={spec.cpus} is refused: it must lie in [{_LEAST_CPUS}, {_MOST_CPUS}]"
        raise SandboxRefusedError(sandbox_id, cause, everywhere=True)
    in_memory = {"memory_mib": spec.memory_mib, "disk_mib": None if profile == "system" else spec.disk_mib}
    for field, asked_mib in in_memory.items():
        if memory_mib is not None and asked_mib is not None and asked_mib > memory_mib:
            cause = f"{field}={asked_mib} is refused: the machine has {memory_mib} MiB of memory"
            raise SandboxRefusedError(sandbox_id, cause + ", in which files lie" * (field == "disk_mib"))


async def _stop(box: Stoppable, failures: list[SandboxError]) -> None:
    try:
        await box.stop()
    except SandboxError as error:
        failures.append(error)
