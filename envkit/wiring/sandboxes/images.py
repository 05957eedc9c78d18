"""Images for boxes, as the commands reach them."""

from envkit.sandbox.docker.image_build import build, names

__all__ = ["build", "names"]
