"""Images for boxes, as the commands reach them."""

from envkit.sandbox.images import build, names

__all__ = ["build", "names"]
