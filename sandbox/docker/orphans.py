"""What a process that is gone has left with a Docker daemon, known by the labels that everything of ours has."""

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
"""How long after it was asked the daemon may still make a container."""
_REAP_S = 15.0
_PAUSE_S = 0.05


def labels(run: str, sandbox_id: str, *, stays: bool, ledger: str = "") -> dict[str, str]:
    """Return the labels of what belongs to a box of this process.

    Args:
        run: Name of the backend's run.
        sandbox_id: The box.
        stays: Whether it outlives us.
        ledger: Id of the ledger in which it is written down if so.
    """
    found = {RUN_LABEL: run, OWNER_LABEL: _owner(), SANDBOX_LABEL: sandbox_id}
    return {**found, DETACHED_LABEL: "yes", LEDGER_LABEL: ledger} if stays else found


@contextmanager
def underway(made: Mapping[str, str]) -> Iterator[None]:
    """Leave a note, for the length of the block, that the daemon is asked for what has the labels `made`.

    It makes that even when we are killed before it answers, so who clears away after us must know what is to come.
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
    """Something of a process that is gone: a ``"container"``, a ``"volume"`` or an ``"image"``."""

    kind: Literal["container", "volume", "image"]
    id: str


async def gone(daemon: Daemon) -> list[Orphan]:
    """Return the containers, volumes and snapshots of processes of this machine that are gone.

    A box that is to stay is none of them while it runs.

    Raises:
        DaemonError: The daemon does not answer.
    """
    containers = await daemon.containers(OWNER_LABEL)
    staying = {_note(one["Labels"]) for one in containers if _stays(one)}
    found = [
        Orphan("container", str(one["Id"])) for one in containers if not _stays(one) and _is_ownerless(one["Labels"])
    ]
    found += [
        Orphan("volume", str(one["Name"]))
        for one in await daemon.volumes(OWNER_LABEL)
        if _is_ownerless(one["Labels"]) and _note(one["Labels"]) not in staying
    ]
    images = await daemon.images(OWNER_LABEL)
    return found + [Orphan("image", str(one["Id"])) for one in images if _is_ownerless(one["Labels"])]


async def reap(daemon: Daemon) -> list[Orphan]:
    """Remove what `gone` returns, and return it. What the daemon was still asked for when its owner died is waited for.
    When this returns nothing is left, except what the daemon does not let go within 15 s.

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
    """Remove what a run of this process has left: snapshots, containers that no box knows of any more, and volumes of
    which a daemon that was restarted lost sight.

    Raises:
        DaemonError: The daemon does not answer.
    """
    with anyio.move_on_after(_ANSWER_S):
        while any(list(root.glob(f"{run}+*")) for root in run_dirs.roots()):  # noqa: ASYNC110 - threads tell nobody
            await anyio.sleep(_PAUSE_S)
    containers = await daemon.containers(f"{RUN_LABEL}={run}")
    for found in containers:
        if not _stays(found):
            await daemon.remove(found["Id"])
    staying = {_note(found["Labels"]) for found in containers if _stays(found)}
    for found in await daemon.volumes(f"{RUN_LABEL}={run}"):
        if _note(found["Labels"]) not in staying:
            await daemon.remove_volume(found["Name"])
    await daemon.remove_orphans()
    for found in await daemon.images(f"{RUN_LABEL}={run}"):
        await daemon.remove_image(found["Id"])


async def _reap_once(daemon: Daemon, removed: set[Orphan]) -> bool:
    """Remove what is found, add it to `removed`, and say whether there was nothing and nothing is to come."""
    notes = list(_notes())  # before we look, since a note is taken away when its container is there
    made = {_note(one["Labels"]) for one in await daemon.containers(OWNER_LABEL)}
    found = await gone(daemon)
    removers = {"container": daemon.remove, "volume": daemon.remove_volume, "image": daemon.remove_image}
    for kind in removers:  # in this order, since a container holds on to its volumes and its image
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
    """Remove something, or leave it to a later look."""
    with suppress(DaemonError):
        await remove(name)


def _notes() -> Iterator[Path]:
    """The notes of processes that are gone, of our user."""
    for root in run_dirs.roots():
        for note in root.glob("envkit-*-*-*-*+*"):
            if run_dirs.is_owner_gone(note.name) and _is_ours(note):
                yield note


def _note(made: Mapping[str, str]) -> str:
    """The name of the note about what has these labels; it begins with the owner's."""
    return f"{made.get(RUN_LABEL)}+{made.get(SANDBOX_LABEL)}"


def _is_ours(note: Path) -> bool:
    try:
        found = note.lstat()
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()


def _is_fresh(note: Path) -> bool:
    """Whether what it is about may still come."""
    try:
        return clock.wall() - note.lstat().st_mtime < _ANSWER_S
    except OSError:
        return False


def _stays(found: Mapping[str, Any]) -> bool:
    return DETACHED_LABEL in found["Labels"] and found["State"] not in _ENDED


async def staying(daemon: Daemon, sandbox_id: str) -> Mapping[str, Any]:
    """Return the container of a box that stays.

    Raises:
        SandboxError: No box of this id stays on this machine.
        DaemonError: The daemon does not answer.
    """
    for found in await daemon.containers(f"{SANDBOX_LABEL}={sandbox_id}"):
        if DETACHED_LABEL in found["Labels"]:
            return found
    raise SandboxError(f"there is no box {sandbox_id!r} that stays on this machine")


def _owner() -> str:
    """This process, as no other on any machine is called."""
    return f"{run_dirs.owner_name(os.getpid())}@{_boot_id()}"


def _is_ownerless(found: Mapping[str, str]) -> bool:
    name, _, boot_id = found[OWNER_LABEL].partition("@")
    return boot_id == _boot_id() and run_dirs.is_owner_gone(name)


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()
