"""Remove orphans from a Docker daemon: containers, volumes and images whose labels name a process that has ended."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

import anyio

from envkit.errors import SandboxError
from envkit.runs import owners

from .api import Daemon, DaemonError

RUN_LABEL = "envkit.run"
OWNER_LABEL = "envkit.owner"
SANDBOX_LABEL = "envkit.sandbox"
DETACHED_LABEL = "envkit.detached"
LEDGER_LABEL = "envkit.ledger"

_ENDED = ("created", "dead", "exited")


def labels(run: str, sandbox_id: str, *, detached: bool, ledger: str = "") -> dict[str, str]:
    """Return the labels of a sandbox's container, volumes and snapshots; they name this process as the owner."""
    found = {RUN_LABEL: run, OWNER_LABEL: _owner(), SANDBOX_LABEL: sandbox_id}
    return {**found, DETACHED_LABEL: "yes", LEDGER_LABEL: ledger} if detached else found


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
    return await _labelled(daemon, OWNER_LABEL, _is_ownerless)


async def reap(daemon: Daemon) -> list[Orphan]:
    """Remove all orphans, and return those that were removed: the daemon may refuse to remove others.

    A container that the daemon is still creating for an ended process is only found by the next call.

    Raises:
        DaemonError: The daemon does not answer.
    """
    return await _remove(daemon, await gone(daemon))


async def clear(daemon: Daemon, run: str) -> None:
    """Remove the containers, volumes and snapshots of the backend with run directory `run`.

    Running detached sandboxes stay.

    Raises:
        DaemonError: The daemon does not answer, or did not remove all.
    """
    found = await _labelled(daemon, f"{RUN_LABEL}={run}", lambda _: True)
    if left := set(found) - set(await _remove(daemon, found)):
        raise DaemonError("not removed: " + ", ".join(f"{one.kind} {one.id}" for one in sorted(left)))


async def _labelled(daemon: Daemon, label: str, is_wanted: Callable[[Mapping[str, str]], bool]) -> list[Orphan]:
    """Return what has `label` and labels that `is_wanted` accepts, except running detached sandboxes."""
    containers = await daemon.containers(label)
    detached = {_name(one["Labels"]) for one in containers if _is_detached(one)}
    found = [Orphan("container", one["Id"]) for one in containers if is_wanted(one["Labels"]) and not _is_detached(one)]
    for one in await daemon.volumes(label):
        if is_wanted(one["Labels"]) and _name(one["Labels"]) not in detached:
            found.append(Orphan("volume", one["Name"]))
    return found + [Orphan("image", one["Id"]) for one in await daemon.images(label) if is_wanted(one["Labels"])]


async def _remove(daemon: Daemon, found: Sequence[Orphan]) -> list[Orphan]:
    removed: list[Orphan] = []

    async def remove(one: Orphan) -> None:
        with suppress(DaemonError):
            await removers[one.kind](one.id)
            removed.append(one)

    removers = {"container": daemon.remove, "volume": daemon.remove_volume, "image": daemon.remove_image}
    for kind in removers:  # remove containers first, because they use the volumes and images
        async with anyio.create_task_group() as tasks:
            for one in found:
                if one.kind == kind:
                    tasks.start_soon(remove, one)
    return sorted(removed)


def _name(made: Mapping[str, str]) -> tuple[str | None, str | None]:
    """Return the run directory and the id of the sandbox whose container or volume has these labels."""
    return made.get(RUN_LABEL), made.get(SANDBOX_LABEL)


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
    return f"{owners.owner_name(os.getpid())}@{_boot_id()}"


def _is_ownerless(found: Mapping[str, str]) -> bool:
    name, _, boot_id = found[OWNER_LABEL].partition("@")
    return boot_id == _boot_id() and owners.is_owner_gone(name)


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()
