"""Files and folders on their way into a box and out of it, as tar streams.

The names of a folder's entries are relative to it, and it is itself the first, ``.``; a file is the only entry.

What comes out of a box is written by somebody who may be hostile. It is put together, by an
`envkit.sandbox.transfer.safe_extract.Unpacker`, in a new folder beside its target. Whole or not at all: it gets its
name at the end.
"""

from __future__ import annotations

import os
import stat
import tarfile
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio

from envkit import clock
from envkit.errors import RefusedFileError, UsageError

from ..host import run_dirs
from .safe_extract import Unpacker

_BLOCK = tarfile.BLOCKSIZE
_PIECE_BYTES = 1 << 20


def is_folder(source: Path) -> bool:
    """Say whether `source` is a folder, and not a link to one."""
    return source.is_dir() and not source.is_symlink()


@asynccontextmanager
async def waiting_place() -> AsyncIterator[Path]:
    """Give a new, private folder for what is on its way; a later run removes it if we cannot.

    Raises:
        RefusedFileError: There is too little space for anything.
    """
    place = await clock.to_thread(run_dirs.new_run_folder)
    try:
        try:
            run_dirs.require_space(place)
        except OSError as error:
            raise RefusedFileError(str(error.strerror)) from None
        yield place
    finally:
        with anyio.CancelScope(shield=True):
            await clock.to_thread(run_dirs.remove, place)


async def packed(source: Path, name: str) -> AsyncGenerator[bytes, None]:
    """Yield the file, link or folder `source` as a tar stream, in pieces of about a MiB.

    Links are not followed. Owners are left out: whoever unpacks it owns it. What is no folder is called `name`.

    Raises:
        UsageError: `source` is missing, cannot be read, or holds what is neither file, folder nor link.
    """
    pieces = _gathered(_packed(source, name))
    while True:
        piece = await clock.to_thread(_next, pieces)
        if not piece:
            return
        yield piece


async def unpacked(pieces: AsyncIterator[bytes], target: Path, *, max_bytes: int, takes_any_link: bool = False) -> None:
    """Write a tar stream to `target`, or nothing at all.

    Setuid, setgid and sticky bits are dropped, and so are owners; what it holds can be read by us.

    Args:
        pieces: The stream.
        target: Must not exist; its folder must.
        max_bytes: Bound on all contents together.
        takes_any_link: Whether links may lead out, for what only waits here to go into a box: nobody follows them.

    Raises:
        UsageError: `target` exists, or its folder does not.
        TooLargeError: There is more than `max_bytes`.
        RefusedFileError: It holds what must not be copied; the message names it.
    """
    place = await clock.to_thread(_place_beside, target)
    unpacker: Unpacker | None = None
    try:
        unpacker = Unpacker(place, max_bytes, takes_any_link=takes_any_link)
        waiting: list[bytes] = []
        count = 0
        async for piece in pieces:
            waiting.append(piece)
            count += len(piece)
            if count >= _PIECE_BYTES:
                await clock.to_thread(unpacker.feed, b"".join(waiting))
                waiting, count = [], 0
        await clock.to_thread(unpacker.feed, b"".join(waiting))
        await clock.to_thread(unpacker.finish, target)
    finally:
        with anyio.CancelScope(shield=True):
            if unpacker is not None:
                unpacker.close()
            await clock.to_thread(run_dirs.remove, place)


def _place_beside(target: Path) -> Path:
    if os.path.lexists(target):
        raise UsageError(f"{target} exists already")
    try:
        return Path(tempfile.mkdtemp(prefix=".envkit-", dir=target.parent))
    except OSError as error:
        raise UsageError(f"{target.parent}: {error.strerror}") from None


def _packed(source: Path, alone: str) -> Iterator[bytes]:
    """Yield the pieces of a tar stream as they come."""
    waiting = [(source, "")]
    while waiting:
        path, name = waiting.pop()
        try:
            about = path.lstat()
            if stat.S_ISDIR(about.st_mode):
                yield _head(about, name or ".", tarfile.DIRTYPE)
                inner = sorted((entry.name for entry in path.iterdir()), reverse=True)
                waiting += [(path / entry, f"{name}/{entry}" if name else entry) for entry in inner]
            elif stat.S_ISLNK(about.st_mode):
                yield _head(about, name or alone, tarfile.SYMTYPE, link=str(path.readlink()))
            elif stat.S_ISREG(about.st_mode):
                yield from _packed_file(path, name or alone)
            else:
                raise UsageError(f"{path} is neither file, folder nor link")
        except OSError as error:
            raise UsageError(f"{path}: {error.strerror}") from None
    yield bytes(2 * _BLOCK)


def _packed_file(path: Path, name: str) -> Iterator[bytes]:
    """Yield a file as it is at this moment; one that shrinks is filled with zeros."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        about = os.fstat(handle)
        if not stat.S_ISREG(about.st_mode):
            raise UsageError(f"{path} is neither file, folder nor link")
        yield _head(about, name, tarfile.REGTYPE, size=about.st_size)
        left = about.st_size
        while left:
            piece = os.read(handle, min(left, _PIECE_BYTES)) or bytes(min(left, _PIECE_BYTES))
            left -= len(piece)
            yield piece
        yield bytes(-about.st_size % _BLOCK)
    finally:
        os.close(handle)


def _head(about: os.stat_result, name: str, kind: bytes, *, size: int = 0, link: str = "") -> bytes:
    member = tarfile.TarInfo(name)
    member.type, member.size, member.linkname = kind, size, link
    member.mode, member.mtime = stat.S_IMODE(about.st_mode) & 0o777, max(int(about.st_mtime), 0)
    return member.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")


def _gathered(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Yield `pieces` in larger ones, so that few threads are needed for many small files."""
    waiting: list[bytes] = []
    count = 0
    for piece in pieces:
        waiting.append(piece)
        count += len(piece)
        if count >= _PIECE_BYTES:
            yield b"".join(waiting)
            waiting, count = [], 0
    yield b"".join(waiting)


def _next(pieces: Iterator[bytes]) -> bytes:
    return next(pieces, b"")
