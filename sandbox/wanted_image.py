"""The image that a box of Docker starts from: found, fetched where that was asked for, or refused with what to do."""

from __future__ import annotations

from http import HTTPStatus

from envkit.errors import SandboxRefusedError, did_you_mean
from envkit.sandbox.container import Image
from envkit.sandbox.daemon import Daemon, DaemonError
from envkit.types import SandboxSpec

DEFAULT_IMAGE = "envkit/games:1"


async def find_image(daemon: Daemon, box_id: str, spec: SandboxSpec, *, pull: bool) -> Image:
    """Return the image that `spec` names, or the default one.

    Args:
        daemon: Where it is looked for.
        box_id: The box that is to start from it.
        spec: What that is to be.
        pull: Whether a missing image is fetched from its registry.

    Raises:
        SandboxRefusedError: There is no such image.
        DaemonError: The daemon does not answer, or cannot fetch it.
    """
    name = spec.image or DEFAULT_IMAGE
    image = await daemon.image(name)
    if image is None and pull:
        try:
            await daemon.pull(name)
        except DaemonError as error:
            if error.http_status != HTTPStatus.NOT_FOUND:
                raise
            raise SandboxRefusedError(box_id, str(error)) from None
        image = await daemon.image(name)
    if image is not None:
        return image
    if spec.image is None:
        raise SandboxRefusedError(box_id, f"there is no image {name} here; make it: envkit image build games")
    near = did_you_mean(name, await daemon.image_names())
    near = near if near.startswith("; did you mean") else ""  # not a list of all that there are
    raise SandboxRefusedError(box_id, f"there is no image {name!r} here (docker pull {name}){near}")
