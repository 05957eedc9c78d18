"""Packs a file or folder into a tar stream (`pack`) and unpacks a tar stream (`unpack`).

Both functions have the rights of the calling process. Files, folders and symbolic links are supported. `pack` skips
devices, sockets and pipes; `unpack` refuses them and hard links.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import tarfile

from ..framing import encoded
from .files import make_folders

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import IO

_PIECE = 1 << 16
_TO_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY


class RefusedEntryError(Exception):
    """An archive is malformed or contains an entry that is not allowed, such as a device."""


def pack(path: bytes, write: Callable[[bytes], object]) -> None:
    """Write an archive of the file or folder `path`.

    A folder is stored as ``.``, and its entries with paths relative to the folder. A file is stored with its own name.
    `path` may be a link, which is followed. Links below `path` are stored as links. Skips other file systems mounted
    below `path`, entries that vanish during packing, and entries that this process may not read.

    Raises:
        OSError: `path` cannot be read, or reading an entry fails for another reason than missing permission.
    """
    fd = os.open(path, _TO_READ)
    try:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            _pack_tree(fd, path, write)
        else:
            _pack_file(fd, os.path.basename(path), write)
    finally:
        os.close(fd)
    write(bytes(2 * tarfile.BLOCKSIZE))


class OpenFolders:
    """Opens the folders of a tree without following links, by opening each path component from its parent.

    `top` is the descriptor of the root folder, and `fd` that of the folder that was entered last.
    """

    def __init__(self, top: int) -> None:
        self.fd = os.dup(top)
        self._top = top
        self._steps: tuple[str | bytes, ...] = ()

    def enter(self, steps: tuple[str | bytes, ...]) -> int:
        """Open the folder with the path `steps` below the root; return its descriptor, valid until the next call."""
        if steps == self._steps:
            return self.fd
        is_next = len(steps) > 0 and steps[:-1] == self._steps
        fd = os.dup(self.fd if is_next else self._top)
        try:
            for step in steps[-1:] if is_next else steps:
                inner = os.open(step, _TO_READ | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=fd)
                os.close(fd)
                fd = inner
        except BaseException:
            os.close(fd)
            raise
        os.close(self.fd)
        self.fd, self._steps = fd, steps
        return fd

    def close(self) -> None:
        os.close(self.fd)


def _pack_tree(top: int, path: bytes, write: Callable[[bytes], object]) -> None:
    device = os.fstat(top).st_dev
    folders = OpenFolders(top)
    waiting: list[tuple[bytes, ...]] = [()]
    at: tuple[bytes, ...] = ()
    try:
        while waiting:
            at = waiting.pop()
            try:
                folders.enter(at)
            except (FileNotFoundError, PermissionError):
                continue
            steps, about = at, os.fstat(folders.fd)
            if about.st_dev != device:
                continue
            write(header(b"/".join(steps) or b".", tarfile.DIRTYPE, about))
            for name in sorted([os.fsencode(entry) for entry in os.listdir(folders.fd)]):
                at = (*steps, name)
                try:
                    about = os.stat(name, dir_fd=folders.fd, follow_symlinks=False)
                    if stat.S_ISDIR(about.st_mode):
                        waiting.append(at)
                    elif about.st_dev == device:
                        _pack_entry(folders.fd, at, about, write)
                except (FileNotFoundError, PermissionError):
                    pass
    except OSError as error:
        # The error names only the last component of the path, so raise an error with the whole path.
        raise OSError(error.errno, error.strerror, os.path.join(path, *at)) from None
    finally:
        folders.close()


def _pack_entry(folder: int, steps: tuple[bytes, ...], about: os.stat_result, write: Callable[[bytes], object]) -> None:
    """Write one file or symbolic link of the folder `folder` to the archive; `steps` is the entry's path."""
    if stat.S_ISLNK(about.st_mode):
        write(header(b"/".join(steps), tarfile.SYMTYPE, about, os.readlink(steps[-1], dir_fd=folder)))
    elif stat.S_ISREG(about.st_mode):
        fd = os.open(steps[-1], _TO_READ | os.O_NOFOLLOW, dir_fd=folder)
        try:
            _pack_file(fd, b"/".join(steps), write)
        finally:
            os.close(fd)


def _pack_file(fd: int, name: bytes, write: Callable[[bytes], object]) -> None:
    about = os.fstat(fd)
    if not stat.S_ISREG(about.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", name)
    for piece in file_pieces(fd, about, name):
        write(piece)


def file_pieces(fd: int, about: os.stat_result, name: bytes, piece_bytes: int = _PIECE) -> Iterator[bytes]:
    """Yield the regular file `fd` as an archive entry. If it shrinks meanwhile, append zeros up to the size `about`."""
    yield header(name, tarfile.REGTYPE, about)
    left = about.st_size
    while left:
        piece = os.read(fd, min(left, piece_bytes)) or bytes(min(left, piece_bytes))
        yield piece
        left -= len(piece)
    yield bytes(-about.st_size % tarfile.BLOCKSIZE)


def header(name: bytes, kind: bytes, about: os.stat_result, target: bytes = b"") -> bytes:
    """Return the header of an entry, without owners and the setuid, setgid and sticky bits."""
    entry = tarfile.TarInfo(_decoded(name))
    entry.type, entry.linkname = kind, _decoded(target)
    entry.size = about.st_size if kind == tarfile.REGTYPE else 0
    entry.mode, entry.mtime = about.st_mode & 0o777, max(int(about.st_mtime), 0)
    return entry.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")


def unpack(top: bytes, archive: IO[bytes], rights: int = 0o777) -> None:
    """Unpack an archive into the folder `top`; create `top` if missing, and replace existing files and links.

    Symbolic links may point out of `top`, as those of a virtual environment do. They give no rights to their targets.

    Args:
        top: Path of the target folder.
        archive: The archive, which is read from the beginning to the end.
        rights: Mode bits that unpacked entries may have; all other bits are cleared.

    Raises:
        RefusedEntryError: The archive is malformed, or contains a device, an absolute path or a path that leads out of
            `top`.
        OSError: An entry cannot be written.
    """
    modes = []
    make_folders(top)
    try:
        with tarfile.open(fileobj=archive, mode="r|", encoding="utf-8", errors="surrogateescape") as entries:
            for entry in entries:
                entries.members = []  # type: ignore[attr-defined] # otherwise tarfile keeps all entries
                parts = _parts(entry.name)
                path = os.path.join(top, *parts)
                mode = entry.mode & 0o777 & rights
                if entry.isdir():
                    is_new = not os.path.isdir(path)
                    make_folders(path)
                    modes.append((path, mode | 0o700 if not parts else mode, is_new))
                else:
                    _unpack_entry(entries, entry, path if parts else b"", mode)
            # Mode r| takes a damaged header for the end. A complete archive ends with two empty blocks; one is read.
            if entries.fileobj.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                raise RefusedEntryError("the archive ends early or is damaged")
    except tarfile.TarError as error:
        raise RefusedEntryError(str(error)) from None
    for path, mode, is_new in reversed(modes):
        try:
            os.chmod(path, mode)
        except PermissionError:
            if is_new:  # Keep the mode of an existing folder, which may belong to another user, as /tmp does.
                raise


def _unpack_entry(entries: tarfile.TarFile, entry: tarfile.TarInfo, path: bytes, mode: int) -> None:
    if not path or not (entry.isreg() or entry.issym()):
        raise RefusedEntryError("%s is not a file, folder or symbolic link" % entry.name)
    make_folders(os.path.dirname(path))
    if os.path.lexists(path):
        os.unlink(path)
    if entry.issym():
        os.symlink(encoded(entry.linkname), path)
        return
    content = entries.extractfile(entry)
    assert content is not None
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb") as file:
        shutil.copyfileobj(content, file, _PIECE)
        file.flush()
        os.fchmod(file.fileno(), mode)
        os.utime(file.fileno(), (entry.mtime, entry.mtime))


def _parts(name: str) -> list[bytes]:
    """Split a path into components; raise `RefusedEntryError` if it leads out of the target folder."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if name.startswith("/") or ".." in parts or "\0" in name:
        raise RefusedEntryError("%s leads out of the target folder" % name)
    return [encoded(part) for part in parts]


def _decoded(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")
