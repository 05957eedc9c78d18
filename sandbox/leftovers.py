"""What a process that is gone has left with a Docker daemon, known by the labels that everything of ours has."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from envkit.errors import SandboxError
from envkit.sandbox import folders
from envkit.sandbox.daemon import Daemon

RUN_LABEL = "envkit.run"
OWNER_LABEL = "envkit.owner"
BOX_LABEL = "envkit.box"
STAY_LABEL = "envkit.stay"

_ENDED = ("created", "dead", "exited")


def labels(run: str, box_id: str, *, stays: bool) -> dict[str, str]:
    """Return the labels of what belongs to a box of this process.

    Args:
        run: Name of the backend's run.
        box_id: The box.
        stays: Whether it outlives us.
    """
    found = {RUN_LABEL: run, OWNER_LABEL: _owner(), BOX_LABEL: box_id}
    return {**found, STAY_LABEL: "yes"} if stays else found


async def reap(daemon: Daemon) -> list[str]:
    """Remove the containers, volumes and snapshots of processes of this machine that are gone; return their names.

    A box that is to stay is left while it runs.

    Raises:
        DaemonError: The daemon does not answer.
    """
    gone = []
    for found in await daemon.containers(OWNER_LABEL):
        stays = STAY_LABEL in found["Labels"] and found["State"] not in _ENDED
        if _is_ownerless(found["Labels"]) and not stays:
            await daemon.remove(found["Id"])
            gone.append(str(found["Id"]))
    for found in await daemon.volumes(OWNER_LABEL):
        if _is_ownerless(found["Labels"]):
            await daemon.remove_volume(found["Name"])
            gone.append(str(found["Name"]))
    for found in await daemon.images(OWNER_LABEL):
        if _is_ownerless(found["Labels"]):
            await daemon.remove_image(found["Id"])
            gone.append(str(found["Id"]))
    return gone


async def staying(daemon: Daemon, box_id: str) -> Mapping[str, Any]:
    """Return the container of a box that stays.

    Raises:
        SandboxError: No box of this id stays on this machine.
        DaemonError: The daemon does not answer.
    """
    for found in await daemon.containers(f"{BOX_LABEL}={box_id}"):
        if STAY_LABEL in found["Labels"]:
            return found
    raise SandboxError(f"there is no box {box_id!r} that stays on this machine")


def _owner() -> str:
    """This process, as no other on any machine is called."""
    return f"{folders.owner_name(os.getpid())}@{_boot_id()}"


def _is_ownerless(found: Mapping[str, str]) -> bool:
    name, _, boot_id = found[OWNER_LABEL].partition("@")
    return boot_id == _boot_id() and folders.is_owner_gone(name)


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()
