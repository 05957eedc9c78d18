"""Snapshots of boxes whose files are nowhere on the host: the trees of the places that can be written, as tar files.

A snapshot is a folder with one file for each place. It holds names, modes, times and contents as the agent's user sees
them; processes, and what only a grader may read, are not in it.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, cast

import anyio

from envkit import clock
from envkit.errors import EnvkitError, SandboxError, SandboxStartError
from envkit.sandbox import folders
from envkit.sandbox.box import Box
from envkit.sandbox.channel import Channel, ChannelEndedError, RefusedCallError
from envkit.types import SandboxSpec

PLACES: Mapping[str, str] = {"workspace.tar": "/workspace", "tmp.tar": "/tmp"}
_MAX_BYTES = 4 << 30
_PIECE_BYTES = 1 << 20
_LOOK_AFTER_BYTES = 16 << 20
"""How much is written between two looks at how much is free."""
_GO_AHEAD = "/run/envkit/.go-ahead"
_WAIT = ("sh", "-c", 'mkfifo "$0" && read -r go < "$0" && rm "$0" && exec "$@"', _GO_AHEAD)
_GO = ("sh", "-c", 'until [ -p "$0" ]; do sleep 0.01; done; echo go > "$0"', _GO_AHEAD)
_NAME = re.compile(r"[a-z0-9-]{1,80}")


def find(parent: Path, name: str) -> Path | None:
    """Return the folder of snapshot `name` in `parent`; None if there is none."""
    folder = parent / name
    return folder if _NAME.fullmatch(name) and folder.is_dir() else None


async def keep(channel: Channel, folder: Path) -> None:
    """Write the places of a box into `folder`, which is made.

    Raises:
        SandboxError: They hold more than 4 GiB, cannot be read, or do not fit on the host's disk.
        ChannelEndedError: The box is gone.
    """
    written = 0
    try:
        _make(folder)
        folders.require_space(folder)
        for file_name, place in PLACES.items():
            call = await channel.start("pack", path=place, max_bytes=_MAX_BYTES, leave_out_closed=True)
            try:
                with _opened(folder / file_name, "xb") as file:
                    while (piece := await call.receive()) is not None:
                        written += file.write(piece[1])
                        if written > _LOOK_AFTER_BYTES:
                            await clock.to_thread(folders.require_space, folder)
                            written = 0
            finally:
                await call.leave()
    except BaseException as error:
        with anyio.CancelScope(shield=True):
            await clock.to_thread(folders.remove, folder)
        if isinstance(error, (RefusedCallError, OSError)) and not isinstance(error, ChannelEndedError):
            raise SandboxError(f"no snapshot: {error}") from error
        raise


def waiting(command: Sequence[str]) -> tuple[str, ...]:
    """Return what runs `command` once `put_back` has put the files back; nothing for no command."""
    return (*_WAIT, *command) if command else ()


async def put_back(box: Box, folder: Path, spec: SandboxSpec) -> None:
    """Write into the places of a box that was started as `spec`, its command `waiting`, what `keep` wrote.

    Raises:
        SandboxStartError: They cannot be written; the box is stopped.
    """
    try:
        for name, place in PLACES.items():
            await box.call("unpack", feed=content(folder / name), path=place)
        if spec.command:
            await box.exec(_GO, timeout_s=spec.start_timeout_s)
    except BaseException as error:
        await box.stop()
        if isinstance(error, EnvkitError):
            raise SandboxStartError(box.id, str(error)) from None
        raise


async def content(path: Path) -> AsyncIterator[bytes]:
    """Yield what lies in a file, in pieces."""
    with _opened(path, "rb") as file:
        while piece := file.read(_PIECE_BYTES):
            yield piece


def _make(folder: Path) -> None:
    folder.mkdir(parents=True, mode=0o700)


def _opened(path: Path, mode: str) -> BinaryIO:
    return cast(BinaryIO, path.open(mode))
