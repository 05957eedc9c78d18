"""Remove orphans from a Docker daemon: containers, volumes and images whose labels name a process that has ended."""

from __future__ import annotations

import os
import platform
import stat
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

import anyio

from envkit import clock
from envkit.errors import SandboxError

from ..host import run_dirs
from .api import Daemon, DaemonError

RUN_LABEL = "envkit.run"
OWNER_LABEL = "envkit.owner"
SANDBOX_LABEL = "envkit.sandbox"
DETACHED_LABEL = "envkit.detached"
LEDGER_LABEL = "envkit.ledger"

_ENDED = ("created", "dead", "exited")
_ANSWER_S = 5.0
"""Maximum seconds between a request and the daemon's creation of the container."""
_REAP_S = 15.0
_PAUSE_S = 0.05


def labels(run: str, sandbox_id: str, *, detached: bool, ledger: str = "") -> dict[str, str]:
    """Return the labels of a sandbox's container, volumes and snapshots; they name this process as the owner.

    Args:
        run: Name of the opened backend's run directory.
        sandbox_id: Id of the sandbox.
        detached: Whether the sandbox outlives this process.
        ledger: Id of the ledger that records a detached sandbox; "" means no ledger.
    """
    found = {RUN_LABEL: run, OWNER_LABEL: _owner(), SANDBOX_LABEL: sandbox_id}
    return {**found, DETACHED_LABEL: "yes", LEDGER_LABEL: ledger} if detached else found


@contextmanager
def pending_creation(made: Mapping[str, str]) -> Iterator[None]:
    """Store a note on disk, while the block runs, that the daemon is creating a container with the labels `made`.

    The daemon creates the container even if this process is killed. The note lets a later process wait for that
    container and remove it.
    """
    notes = [root / _note(made) for root in run_dirs.common_first()][:1]
    with suppress(OSError):
        for note in notes:
            os.close(os.open(note, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
    try:
        yield
    finally:
        for note in notes:
            note.unlink(missing_ok=True)


class Orphan(NamedTuple):
    """A container, volume or image whose owner process has ended."""

    kind: Literal["container", "volume", "image"]
    id: str


async def gone(daemon: Daemon) -> list[Orphan]:
    """Return the containers, volumes and images whose owner was a process of this machine that has ended.

    Running detached sandboxes are not orphans, and are not included.

    Raises:
        DaemonError: The daemon does not answer.
    """
    containers = await daemon.containers(OWNER_LABEL)
    detached = {_note(one["Labels"]) for one in containers if _is_detached(one)}
    found = [
        Orphan("container", str(one["Id"]))
        for one in containers
        if not _is_detached(one) and _is_ownerless(one["Labels"])
    ]
    found += [
        Orphan("volume", str(one["Name"]))
        for one in await daemon.volumes(OWNER_LABEL)
        if _is_ownerless(one["Labels"]) and _note(one["Labels"]) not in detached
    ]
    images = await daemon.images(OWNER_LABEL)
    return found + [Orphan("image", str(one["Id"])) for one in images if _is_ownerless(one["Labels"])]


async def reap(daemon: Daemon) -> list[Orphan]:
    """Remove and return all orphans, including containers that the daemon was still creating when their owner ended.

    If the daemon cannot remove some of them within 15 s, they stay.

    Raises:
        DaemonError: The daemon does not answer.
    """
    removed: set[Orphan] = set()
    deadline = clock.now() + _REAP_S
    while not await _reap_once(daemon, removed):
        if clock.now() > deadline:
            break
        await anyio.sleep(_PAUSE_S)
    return sorted(removed)


async def clear(daemon: Daemon, run: str) -> None:
    """Remove the containers, volumes and snapshots that a run of this process has left, except detached sandboxes.

    Raises:
        DaemonError: The daemon does not answer.
    """
    with anyio.move_on_after(_ANSWER_S):
        while any(list(root.glob(f"{run}+*")) for root in run_dirs.roots()):  # noqa: ASYNC110 - no event to wait for
            await anyio.sleep(_PAUSE_S)
    containers = await daemon.containers(f"{RUN_LABEL}={run}")
    for found in containers:
        if not _is_detached(found):
            await daemon.remove(found["Id"])
    detached = {_note(found["Labels"]) for found in containers if _is_detached(found)}
    for found in await daemon.volumes(f"{RUN_LABEL}={run}"):
        if _note(found["Labels"]) not in detached:
            await daemon.remove_volume(found["Name"])
    await daemon.remove_orphans()
    for found in await daemon.images(f"{RUN_LABEL}={run}"):
        await daemon.remove_image(found["Id"])


async def _reap_once(daemon: Daemon, removed: set[Orphan]) -> bool:
    """Try to remove all orphans and add them to `removed`; return True if none was found and no creation is pending."""
    notes = list(_notes())  # read the notes before the query, because a note is deleted once its container exists
    made = {_note(one["Labels"]) for one in await daemon.containers(OWNER_LABEL)}
    found = await gone(daemon)
    removers = {"container": daemon.remove, "volume": daemon.remove_volume, "image": daemon.remove_image}
    for kind in removers:  # remove containers first, because they use the volumes and images
        async with anyio.create_task_group() as tasks:
            for one in found:
                if one.kind == kind:
                    tasks.start_soon(_unless_refused, removers[kind], one.id)
    for note in notes:
        if note.name in made or not _is_fresh(note):
            note.unlink(missing_ok=True)
    removed.update(found)
    return not found and not any(note.exists() for note in notes)


async def _unless_refused(remove: Callable[[str], Awaitable[None]], name: str) -> None:
    """Call `remove` with `name`; ignore a refusal by the daemon, because the removal is tried again."""
    with suppress(DaemonError):
        await remove(name)


def _notes() -> Iterator[Path]:
    """Yield the notes of ended processes of the current user."""
    for root in run_dirs.roots():
        for note in root.glob("envkit-*-*-*-*+*"):
            if run_dirs.is_owner_gone(note.name) and _is_ours(note):
                yield note


def _note(made: Mapping[str, str]) -> str:
    """Return the name of the note for a container with these labels; it starts with the owner's name."""
    return f"{made.get(RUN_LABEL)}+{made.get(SANDBOX_LABEL)}"


def _is_ours(note: Path) -> bool:
    try:
        found = note.lstat()
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()


def _is_fresh(note: Path) -> bool:
    """Whether the note is so new that the daemon may still create its container."""
    try:
        return clock.wall() - note.lstat().st_mtime < _ANSWER_S
    except OSError:
        return False


def _is_detached(found: Mapping[str, Any]) -> bool:
    return DETACHED_LABEL in found["Labels"] and found["State"] not in _ENDED


async def find_detached(daemon: Daemon, sandbox_id: str) -> Mapping[str, Any]:
    """Return the container of a detached sandbox.

    Raises:
        SandboxError: No detached sandbox on this machine has this id.
        DaemonError: The daemon does not answer.
    """
    for found in await daemon.containers(f"{SANDBOX_LABEL}={sandbox_id}"):
        if DETACHED_LABEL in found["Labels"]:
            return found
    raise SandboxError(f"there is no detached sandbox {sandbox_id!r} on this machine")


def _owner() -> str:
    """Return a name of this process that is unique among all machines."""
    return f"{run_dirs.owner_name(os.getpid())}@{_boot_id()}"


def _is_ownerless(found: Mapping[str, str]) -> bool:
    name, _, boot_id = found[OWNER_LABEL].partition("@")
    return boot_id == _boot_id() and run_dirs.is_owner_gone(name)


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()
