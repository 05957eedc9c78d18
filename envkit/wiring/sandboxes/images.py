"""The function that builds a Docker image for sandboxes."""

from envkit.sandbox.docker.image_build import build

__all__ = ["build"]
