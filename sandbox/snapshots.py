"""Snapshots of boxes whose files are nowhere on the host: the trees of the places that can be written, as tar files.

A snapshot is a folder with one file for each place. It holds names, modes, times and contents as the agent's user sees
them; processes, and what only a grader may read, are not in it.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import BinaryIO

from envkit import clock
from envkit.errors import SandboxError
from envkit.sandbox import folders
from envkit.sandbox.channel import Channel

PLACES: Mapping[str, str] = {"workspace.tar": "/workspace", "tmp.tar": "/tmp"}
_MAX_BYTES = 4 << 30
_PIECE_BYTES = 1 << 20
_UNPACK_S = 600.0
_NAME = re.compile(r"[a-z0-9-]{1,80}")


def find(parent: Path, name: str) -> Path | None:
    """Return the folder of snapshot `name` in `parent`; None if there is none."""
    folder = parent / name
    return folder if _NAME.fullmatch(name) and folder.is_dir() else None


async def keep(channel: Channel, folder: Path) -> None:
    """Write the places of a box into `folder`, which is made.

    Raises:
        SandboxError: They hold more than 4 GiB, or the host's disk is full.
        RefusedCallError: They cannot be read.
        ChannelEndedError: The box is gone.
    """
    _make(folder)
    try:
        for file_name, place in PLACES.items():
            call = await channel.start("pack", path=place, limit=_MAX_BYTES)
            with _opened(folder / file_name, "xb") as file:
                while (piece := await call.receive()) is not None:
                    file.write(piece[1])
    except BaseException as error:
        await clock.to_thread(folders.remove, folder)
        if isinstance(error, OSError):
            raise SandboxError(f"no snapshot: {error}") from error
        raise


async def put_back(channel: Channel, folder: Path) -> None:
    """Write into the places of a box what `keep` wrote into `folder`.

    Raises:
        RefusedCallError: They cannot be written.
        ChannelEndedError: The box is gone.
    """
    for file_name, place in PLACES.items():
        with _opened(folder / file_name, "rb") as file:
            await channel.call("unpack", path=place, feed=_pieces(file), deadline_s=_UNPACK_S)


async def _pieces(file: BinaryIO) -> AsyncIterator[bytes]:
    while piece := file.read(_PIECE_BYTES):
        yield piece


def _make(folder: Path) -> None:
    folder.mkdir(parents=True, mode=0o700)


def _opened(path: Path, mode: str) -> BinaryIO:
    file = path.open(mode)
    assert isinstance(file, BinaryIO)
    return file
