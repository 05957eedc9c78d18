"""Unpacks a tar stream from a sandbox, which may be malicious, into a folder of the host.

Each name is opened relative to its parent folder's file descriptor, without following symbolic links. Only folders,
regular files and symbolic links to targets inside the folder are accepted.
"""

from __future__ import annotations

import os
import stat
import tarfile
from collections.abc import Generator
from pathlib import Path
from typing import TypeAlias

from envkit.errors import RefusedFileError, TooLargeError, UsageError

from ..agent.files.tar import OpenFolders

_BLOCK = tarfile.BLOCKSIZE
_PIECE_BYTES = 1 << 20
_MAX_NAME_BYTES = 64 << 10
"""Maximum size of the tar entries that contain a long name or an extended header."""
_MAX_DEPTH = 256
"""Maximum nesting of folders; many programs fail with deeper trees, e.g. when they remove them."""
_MAX_TIME_S = 1 << 33

_Reader: TypeAlias = Generator[int, bytes, None]
"""Generator that yields how many bytes it needs next (at most `_PIECE_BYTES`), and receives them through `send`."""


class Unpacker:
    """Unpacks a tar stream piece by piece into the folder `place`, as ``tree``; `finish` moves ``tree`` to the target.

    Args:
        place: New folder that no other process writes to.
        max_bytes: Maximum total size of the unpacked files in bytes.
        allows_any_link: Whether symbolic links may lead out of the unpacked tree.
    """

    def __init__(self, place: Path, max_bytes: int, *, allows_any_link: bool = False) -> None:
        self._place = place
        self._allows_any_link = allows_any_link
        self._left = self._max_bytes = max_bytes
        self._waiting = bytearray()
        self._modes: list[tuple[tuple[str, ...], int]] = []
        self._is_root_made = False
        self._is_over = False
        self._handle = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._folders = OpenFolders(self._handle)
        self._reader = self._read()
        self._needed = next(self._reader)

    def feed(self, data: bytes) -> None:
        """Unpack `data`, the next bytes of the stream; raises the same errors as `tar_stream.unpacked`."""
        waiting = self._waiting
        waiting += data
        at = 0
        while not self._is_over and len(waiting) - at >= self._needed:
            piece = bytes(waiting[at : at + self._needed])
            at += self._needed
            try:
                self._needed = self._reader.send(piece)
            except StopIteration:
                self._is_over = True
        del waiting[:at]
        if self._is_over:
            waiting.clear()

    def finish(self, target: Path) -> None:
        """Move the unpacked tree to `target`; raises the same errors as `tar_stream.unpacked`."""
        if not self._is_over or not self._is_root_made:
            raise RefusedFileError("the tar stream from the sandbox ends early")
        for parts, mode in reversed(self._modes):
            os.chmod(parts[-1], mode, dir_fd=self._folders.enter(parts[:-1]))
        if os.path.lexists(target):
            raise UsageError(f"{target} exists already")
        (self._place / "tree").rename(target)

    def close(self) -> None:
        """Close the open folders."""
        self._reader.close()
        os.close(self._handle)
        self._folders.close()

    def _read(self) -> _Reader:
        """Unpack the members of the archive one by one."""
        name: bytes | None = None
        link: bytes | None = None
        while (block := (yield _BLOCK)) != bytes(_BLOCK):
            member = _header(block)
            if member.type in (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE):
                content = yield from _long(member)
                if member.type == tarfile.GNUTYPE_LONGNAME:
                    name = content.rstrip(b"\0")
                elif member.type == tarfile.GNUTYPE_LONGLINK:
                    link = content.rstrip(b"\0")
                else:
                    records = _records(content)
                    name, link = records.get(b"path", name), records.get(b"linkpath", link)
                continue
            if name is not None:
                member.name = os.fsdecode(name)
            if link is not None:
                member.linkname = os.fsdecode(link)
            yield from self._take(member)
            name = link = None

    def _take(self, member: tarfile.TarInfo) -> _Reader:
        parts = _parts(member.name)
        if not self._is_root_made and len(parts) == (0 if member.isdir() else 1):
            parts = ()  # The archive's first member is the root of the tree. Ignore its name.
        elif not self._is_root_made or not parts:
            raise RefusedFileError(f"{_shown(member.name)}: the first entry, and only it, must be the root of the tree")
        place = ("tree", *parts)
        try:
            folder, name = self._folders.enter(place[:-1]), place[-1]
            if member.isdir():
                os.mkdir(name, 0o700, dir_fd=folder)
                self._modes.append((place, stat.S_IMODE(member.mode) & 0o777 | 0o700))
            elif member.type in (tarfile.REGTYPE, tarfile.AREGTYPE):
                yield from self._take_file(member, folder, name)
            elif member.issym():
                if not self._allows_any_link:
                    _check_link(member, len(parts) - 1)
                os.symlink(member.linkname, name, dir_fd=folder)
            else:
                raise RefusedFileError(f"{_shown(member.name)} is not a file, folder or symbolic link")
        except OSError as error:
            raise RefusedFileError(f"{_shown(member.name)}: {error.strerror}") from None
        self._is_root_made = True

    def _take_file(self, member: tarfile.TarInfo, folder: int, name: str) -> _Reader:
        if member.size > self._left:
            raise TooLargeError(f"{_shown(member.name)}: the files have more than {self._max_bytes} bytes in total")
        self._left -= member.size
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        handle = os.open(name, flags, 0o600, dir_fd=folder)
        try:
            left = member.size
            while left:
                piece = yield min(left, _PIECE_BYTES)
                left -= len(piece)
                view = memoryview(piece)
                while view:
                    view = view[os.write(handle, view) :]
            os.fchmod(handle, stat.S_IMODE(member.mode) & 0o777 | 0o400)
            time_s = min(max(int(member.mtime), 0), _MAX_TIME_S)
            os.utime(handle, (time_s, time_s))
        finally:
            os.close(handle)
        if padding := -member.size % _BLOCK:
            yield padding


def _header(block: bytes) -> tarfile.TarInfo:
    try:
        member = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.HeaderError as error:
        raise RefusedFileError(f"invalid tar stream from the sandbox: {error}") from None
    if member.size < 0:
        raise RefusedFileError("invalid tar stream from the sandbox: negative size")
    return member


def _long(member: tarfile.TarInfo) -> Generator[int, bytes, bytes]:
    """Read the content of `member`, which is a long name or an extended header."""
    if member.size > _MAX_NAME_BYTES:
        raise RefusedFileError(f"name or extended header too large ({member.size} bytes, limit {_MAX_NAME_BYTES})")
    size = member.size + -member.size % _BLOCK
    return (yield size)[: member.size] if size else b""


def _records(content: bytes) -> dict[bytes, bytes]:
    """Decode POSIX extended header records, each ``LENGTH NAME=VALUE`` and a newline.

    Raises:
        RefusedFileError: A record is malformed, or sets the size of an entry or the layout of a sparse file.
    """
    found: dict[bytes, bytes] = {}
    while content:
        digits, _, _ = content[:8].partition(b" ")
        length = int(digits) if digits.isdigit() else 0
        record, content = content[:length], content[length:]
        name, equals, value = record[len(digits) + 1 : -1].partition(b"=")
        if not equals or not record.endswith(b"\n") or name == b"size" or name.startswith(b"GNU.sparse"):
            raise RefusedFileError("invalid tar stream from the sandbox: unsupported extended header")
        found[name] = value
    return found


def _parts(name: str) -> tuple[str, ...]:
    """Split a tar member's name into its parts; raise `RefusedFileError` if it leads out of the target folder."""
    parts = tuple(part for part in name.split("/") if part not in ("", "."))
    if name.startswith("/") or ".." in parts or "\0" in name or not name:
        raise RefusedFileError(f"{_shown(name)} leads out of the target folder")
    if len(parts) > _MAX_DEPTH:
        raise RefusedFileError(f"{_shown(name)} is more than {_MAX_DEPTH} folders deep")
    return parts


def _check_link(member: tarfile.TarInfo, depth: int) -> None:
    """Refuse a symbolic link that could lead out of the unpacked tree.

    In the link's target, ``..`` is allowed only at the start, and only up to the root of the tree. The link's folder is
    not itself a link, so such a target is inside the tree, even if its path contains other accepted links.

    Args:
        member: The symbolic link.
        depth: Number of folders between the root of the tree and the link.
    """
    steps = [step for step in member.linkname.split("/") if step not in ("", ".")]
    ups = next((index for index, step in enumerate(steps) if step != ".."), len(steps))
    leads_out = member.linkname.startswith("/") or ups > depth or ".." in steps[ups:]
    if leads_out or not member.linkname or "\0" in member.linkname:
        raise RefusedFileError(f"{_shown(member.name)} is a link to {_shown(member.linkname)} outside the tree")


def _shown(name: str) -> str:
    return repr(name if len(name) <= 200 else f"{name[:200]}...")
