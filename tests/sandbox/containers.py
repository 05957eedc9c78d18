"""Shared by the tests of Docker: images with Python, and the containers that the daemon lists."""

from __future__ import annotations

import os
import subprocess
from functools import cache
from typing import NoReturn

import pytest

from envkit.sandbox.docker.images import OFFLINE_BASE


@cache
def image() -> str:
    """Return the image with Python that ``docker/with-base`` makes; without it, skip, or fail if Docker is required."""
    if not docker("image", "ls", "--quiet", OFFLINE_BASE):
        missing(f"there is no image {OFFLINE_BASE}; docker/base-from-debootstrap makes it")
    return OFFLINE_BASE


def missing(reason: str) -> NoReturn:
    """Skip the test, or fail it where Docker is required."""
    if "docker" in os.environ.get("ENVKIT_REQUIRE", "").split(","):
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


def docker(*arguments: str) -> str:
    """Return the output of the docker command."""
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.strip()


def containers_of(sandbox_id: str, pid: int | None = None) -> list[str]:
    """Return the ids of the containers of a sandbox that this process, or process `pid`, started."""
    owner = os.getpid() if pid is None else pid
    lines = docker(
        "ps", "--all", "--format", '{{.ID}} {{.Label "envkit.sandbox"}} {{.Label "envkit.owner"}}', "--no-trunc"
    ).splitlines()
    ours = (line.split(" ") for line in lines if f"-{owner}-" in line)
    return [container for container, sandbox, _ in ours if sandbox == sandbox_id]
