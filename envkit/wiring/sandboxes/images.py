"""Functions that build a Docker image for sandboxes and list the images that can be built."""

from envkit.sandbox.docker.image_build import build, names

__all__ = ["build", "names"]
