"""What a process that is gone has left with a Docker daemon, known by the labels that everything of ours has."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple

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


class Leftover(NamedTuple):
    """Something of a process that is gone: a ``"container"``, a ``"volume"`` or an ``"image"``."""

    kind: Literal["container", "volume", "image"]
    id: str


async def gone(daemon: Daemon) -> list[Leftover]:
    """Return the containers, volumes and snapshots of processes of this machine that are gone.

    A box that is to stay is none of them while it runs.

    Raises:
        DaemonError: The daemon does not answer.
    """
    found: list[Leftover] = []
    for one in await daemon.containers(OWNER_LABEL):
        stays = STAY_LABEL in one["Labels"] and one["State"] not in _ENDED
        if _is_ownerless(one["Labels"]) and not stays:
            found.append(Leftover("container", str(one["Id"])))
    volumes, images = await daemon.volumes(OWNER_LABEL), await daemon.images(OWNER_LABEL)
    found += [Leftover("volume", str(one["Name"])) for one in volumes if _is_ownerless(one["Labels"])]
    found += [Leftover("image", str(one["Id"])) for one in images if _is_ownerless(one["Labels"])]
    return found


async def reap(daemon: Daemon) -> list[Leftover]:
    """Remove what `gone` returns, and return it.

    Raises:
        DaemonError: The daemon does not answer.
    """
    removers = {"container": daemon.remove, "volume": daemon.remove_volume, "image": daemon.remove_image}
    found = await gone(daemon)
    for kind, id in found:
        await removers[kind](id)
    return found


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
