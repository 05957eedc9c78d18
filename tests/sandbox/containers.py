"""What the tests of Docker share: an image with Python that is on this machine, and what is left with the daemon."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Awaitable, Callable
from functools import cache

import anyio
import pytest

from envkit import clock

_WHOLE = ("envkit/base:bookworm", "python:3.11-slim", "envkit/games:1")
_REDUCED = ("debian:bookworm-offline",)  # its Python lacks parts, such as json and ctypes


@cache
def image(*, whole: bool = False) -> str:
    """Return an image with Python; skip, or fail where Docker is required, if there is none.

    Args:
        whole: Whether a Python without parts of its library, such as Debian's python3-minimal, will not do.
    """
    for name in _WHOLE if whole else _WHOLE + _REDUCED:
        if docker("image", "ls", "--quiet", name):
            return name
    reason = "no image with Python is here; docker/base-from-debootstrap makes one"
    if "docker" in os.environ.get("ENVKIT_REQUIRE", "").split(","):
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


def docker(*arguments: str) -> str:
    """Return what Docker's own program says."""
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.strip()


def containers_of(box_id: str, pid: int | None = None) -> list[str]:
    """Return the ids of the containers of one of our boxes, or of another process."""
    owner = os.getpid() if pid is None else pid
    lines = docker(
        "ps", "--all", "--format", '{{.ID}} {{.Label "envkit.box"}} {{.Label "envkit.owner"}}', "--no-trunc"
    ).splitlines()
    ours = (line.split(" ") for line in lines if f"-{owner}-" in line)
    return [container for container, box, _ in ours if box == box_id]


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        with anyio.fail_after(90):
            await main()

    clock.run(bounded)
