"""Pack files and folders into tar streams for sandboxes, and unpack tar streams from sandboxes.

The stream of a folder begins with the folder itself, named ``.``; all other names are relative to that folder. The
stream of a file has only one entry.

A stream from a sandbox may be malicious. An `envkit.sandbox.transfer.safe_extract.Unpacker` unpacks it in a new folder
next to the target, then moves the result to the target. So the target appears completely or not at all.
"""

from __future__ import annotations

import os
import stat
import tarfile
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import anyio

from envkit import clock
from envkit.errors import RefusedFileError, UsageError

from ..agent.files.tar import file_pieces, header
from ..host import run_dirs
from .safe_extract import Unpacker

_BLOCK = tarfile.BLOCKSIZE
_PIECE_BYTES = 1 << 20


def is_folder(source: Path) -> bool:
    """Return whether `source` is a folder, and not a symbolic link to a folder."""
    return source.is_dir() and not source.is_symlink()


@asynccontextmanager
async def staging_folder() -> AsyncIterator[Path]:
    """Yield a new private folder for a transfer, and remove it afterwards (in a later run if this process is killed).

    Raises:
        RefusedFileError: The disk is nearly full.
    """
    folder = await clock.to_thread(run_dirs.new_run_folder)
    try:
        try:
            run_dirs.require_space(folder)
        except OSError as error:
            raise RefusedFileError(str(error.strerror)) from None
        yield folder
    finally:
        with anyio.CancelScope(shield=True):
            await clock.to_thread(run_dirs.remove, folder)


async def packed(source: Path, name: str) -> AsyncGenerator[bytes, None]:
    """Yield the file, symbolic link or folder `source` as a tar stream, in pieces of about 1 MiB.

    Links are not followed. Owners are omitted. A file or link is stored under `name`, a folder as ``.``.

    Raises:
        UsageError: `source` is missing, cannot be read, or contains an entry other than a file, folder or link.
    """
    pieces = _packed(source, name)
    while gathered := await clock.to_thread(_gathered, pieces):
        yield gathered


async def unpacked(
    pieces: AsyncIterator[bytes], target: Path, *, max_bytes: int, allows_any_link: bool = False
) -> None:
    """Unpack a tar stream to `target`, completely or not at all.

    Owners and the setuid, setgid and sticky bits are dropped. This process can read all unpacked files and folders.

    Args:
        pieces: The stream.
        target: Path to create. It must not exist, but its parent folder must.
        max_bytes: Maximum total size of the unpacked files in bytes.
        allows_any_link: Whether symbolic links may lead out of the unpacked tree. Set it only if the files are then
            copied into a sandbox and the host never follows their links.

    Raises:
        UsageError: `target` exists, or its parent folder does not exist.
        TooLargeError: The files exceed `max_bytes`.
        RefusedFileError: An entry is not allowed; the message names it.
    """
    folder = await clock.to_thread(_temporary_folder, target)
    try:
        with closing(Unpacker(folder, max_bytes, allows_any_link=allows_any_link)) as unpacker:
            async for piece in joined(pieces):
                await clock.to_thread(unpacker.feed, piece)
            await clock.to_thread(unpacker.finish, target)
    finally:
        with anyio.CancelScope(shield=True):
            await clock.to_thread(run_dirs.remove, folder)


async def joined(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Join `pieces` to at least 1 MiB each (except the last), because each piece costs a call in another thread."""
    waiting = bytearray()
    async for piece in pieces:
        waiting += piece
        if len(waiting) >= _PIECE_BYTES:
            yield bytes(waiting)
            waiting.clear()
    yield bytes(waiting)


def _temporary_folder(target: Path) -> Path:
    if os.path.lexists(target):
        raise UsageError(f"{target} exists already")
    try:
        return Path(tempfile.mkdtemp(prefix=".envkit-", dir=target.parent))
    except OSError as error:
        raise UsageError(f"{target.parent}: {error.strerror}") from None


def _packed(source: Path, alone: str) -> Iterator[bytes]:
    """Yield `source` as a tar stream in pieces of any size. A file or link is stored under the name `alone`."""
    waiting = [(source, "")]
    while waiting:
        path, name = waiting.pop()
        try:
            about = path.lstat()
            if stat.S_ISDIR(about.st_mode):
                yield header(os.fsencode(name or "."), tarfile.DIRTYPE, about)
                inner = sorted((entry.name for entry in path.iterdir()), reverse=True)
                waiting += [(path / entry, f"{name}/{entry}" if name else entry) for entry in inner]
            elif stat.S_ISLNK(about.st_mode):
                yield header(os.fsencode(name or alone), tarfile.SYMTYPE, about, os.fsencode(path.readlink()))
            elif stat.S_ISREG(about.st_mode):
                yield from _packed_file(path, name or alone)
            else:
                raise UsageError(f"{path} is neither file, folder nor link")
        except OSError as error:
            raise UsageError(f"{path}: {error.strerror}") from None
    yield bytes(2 * _BLOCK)


def _packed_file(path: Path, name: str) -> Iterator[bytes]:
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        about = os.fstat(handle)
        if not stat.S_ISREG(about.st_mode):
            raise UsageError(f"{path} is neither file, folder nor link")
        yield from file_pieces(handle, about, os.fsencode(name), _PIECE_BYTES)
    finally:
        os.close(handle)


def _gathered(pieces: Iterator[bytes]) -> bytes:
    """Join the next `pieces` to at least 1 MiB, unless they end before; return empty bytes after the end."""
    waiting = bytearray()
    for piece in pieces:
        waiting += piece
        if len(waiting) >= _PIECE_BYTES:
            break
    return bytes(waiting)
