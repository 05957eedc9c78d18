"""Docker images for sandboxes, for commands."""

from envkit.sandbox.docker.image_build import build, names

__all__ = ["build", "names"]
