"""Connecting to the sockets of a box, whose folder is in the box's hands."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeAlias

import anyio
import pytest

from envkit import clock
from envkit.errors import UnreachableError
from envkit.sandbox.local import LocalBackend
from envkit.sandbox.process import ProcessBackend
from envkit.types import SandboxSpec

BackendClass: TypeAlias = type[LocalBackend] | type[ProcessBackend]


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        with anyio.fail_after(60):
            await main()

    clock.run(bounded)


def program(source: str) -> tuple[str, ...]:
    return (sys.executable, "-c", source)


@pytest.mark.parametrize("place", ["link to a socket", "link to nowhere", "file", "folder"])
def test_what_is_not_a_socket_itself_is_not_connected_to(
    backend_class: BackendClass, place: str, tmp_path: Path
) -> None:
    async def main() -> None:
        listener = socket.socket(socket.AF_UNIX)
        target = tmp_path / "host.sock"
        os.chdir(tmp_path)  # the path of a socket must be short
        listener.bind("host.sock")
        listener.listen()
        make = {
            "link to a socket": f"ln -s {target} $ENVKIT_SOCKETS/bait",
            "link to nowhere": "ln -s /nowhere $ENVKIT_SOCKETS/bait",
            "file": "echo > $ENVKIT_SOCKETS/bait",
            "folder": "mkdir $ENVKIT_SOCKETS/bait",
        }[place]
        async with backend_class() as backend:
            box = await backend.start(SandboxSpec(("sleep", "1000")))
            assert (await box.exec(["sh", "-c", make], timeout_s=10)).exit_code == 0
            with listener, pytest.raises(UnreachableError, match="bait is not a socket"):
                await box.connect("bait")

    before = Path.cwd()
    try:
        run(main)
    finally:
        os.chdir(before)


@pytest.mark.parametrize("name", ["", "..", "../../etc/passwd", "/var/run/docker.sock", "a\0b"])
def test_only_names_within_the_folder_of_sockets_are_connected_to(backend_class: BackendClass, name: str) -> None:
    async def main() -> None:
        async with backend_class() as backend:
            box = await backend.start(SandboxSpec(("sleep", "1000")))
            with pytest.raises(UnreachableError, match="is not the name of a socket"):
                await box.connect(name)

    run(main)


def test_a_socket_on_which_nobody_listens_is_unreachable(backend_class: BackendClass) -> None:
    async def main() -> None:
        leave = "import os, socket; socket.socket(socket.AF_UNIX).bind(os.environ['ENVKIT_SOCKETS'] + '/old.sock')"
        async with backend_class() as backend:
            box = await backend.start(SandboxSpec(("sleep", "1000")))
            with pytest.raises(UnreachableError, match=r"old.sock: No such file"):
                await box.connect("old.sock")
            assert (await box.exec(program(leave), timeout_s=20)).exit_code == 0
            with pytest.raises(UnreachableError, match=r"old.sock: Connection refused"):
                await box.connect("old.sock")

    run(main)
