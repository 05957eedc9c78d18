"""Find the image of a Docker sandbox. If it is missing, the error says how to get it."""

from __future__ import annotations

from collections.abc import Sequence

from envkit.errors import SandboxRefusedError, did_you_mean
from envkit.installation import command
from envkit.types import SandboxSpec

from .api import Daemon
from .container_config import Image

GAMES_IMAGE = "envkit/games:1"
"""Image of sandboxes that run environments: it contains envkit, with the solutions of all its tasks.

The number in its tag, and in that of `PLAIN_IMAGE`, increases with each incompatible change.
"""
PLAIN_IMAGE = "envkit/python:1"
"""Default image of all other sandboxes, without envkit. Without it, a base image is the default."""
ONLINE_BASE = "python:3.11-slim"
OFFLINE_BASE = "envkit/base:bookworm"
"""Base image that ``docker/base-from-debootstrap`` creates, for machines without access to a registry."""


async def find_image(daemon: Daemon, sandbox_id: str, spec: SandboxSpec) -> Image:
    """Return the image that `spec` names; if it names none, `PLAIN_IMAGE`, or without it a base image.

    Raises:
        SandboxRefusedError: The image does not exist.
        DaemonError: The daemon does not answer.
    """
    name = await present(daemon, spec.image or PLAIN_IMAGE)
    image = await daemon.image(name)
    if image is None:
        raise SandboxRefusedError(sandbox_id, await why_missing(daemon, name))
    return image


async def why_missing(daemon: Daemon, name: str) -> str:
    """Return one line that says that the image is missing, and how to get it."""
    there = await daemon.image_names()
    if name in (GAMES_IMAGE, PLAIN_IMAGE):
        return f"there is no image {name} here; build it: {build_command(name, there)}"
    near = did_you_mean(name, there, lists=False)
    return f"there is no image {name!r} here (docker pull {name}, or envkit image build NAME --tag {name}){near}"


def build_command(name: str, images: Sequence[str]) -> str:
    """Return the command that builds an image of envkit: with ``--offline`` if only the offline base is in `images`."""
    is_offline = OFFLINE_BASE in images and ONLINE_BASE not in images
    kind = name.removeprefix("envkit/").removesuffix(":1")
    return command("image", "build", kind, *(["--offline"] if is_offline else []))


async def present(daemon: Daemon, name: str) -> str:
    """Return `name`, or a base image that is here if `PLAIN_IMAGE` is not."""
    for one in (name, ONLINE_BASE, OFFLINE_BASE) if name == PLAIN_IMAGE else ():
        if await daemon.image(one) is not None:
            return one
    return name
