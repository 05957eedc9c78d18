"""Packs a file or folder into a tar stream (`pack`) and unpacks a tar stream (`unpack`).

Both functions have the rights of the calling process. The headers are those of `tarfile`; its streams are not used,
because they take a torn archive for a complete one, and follow links.

Files, folders and symbolic links are supported. `pack` skips devices, sockets and pipes. `unpack` reads only archives
that `pack` or `envkit.sandbox.transfer.tar_stream` has written (GNU format), and refuses everything else.
"""

from __future__ import annotations

import errno
import os
import stat
import tarfile

from .files import make_folders

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_BLOCK = tarfile.BLOCKSIZE
_PIECE_BYTES = 1 << 16
_MAX_NAME_BYTES = 1 << 16
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
    write(bytes(2 * _BLOCK))


class OpenFolders:
    """Opens the folders of a tree without following links, by opening each path component from its parent.

    Args:
        top: Descriptor of the root folder.

    Attributes:
        fd: Descriptor of the folder that was entered last.
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
            write(header(about, b"/".join(steps) or b".", tarfile.DIRTYPE))
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
        write(header(about, b"/".join(steps), tarfile.SYMTYPE, link=os.readlink(steps[-1], dir_fd=folder)))
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


def file_pieces(fd: int, about: os.stat_result, name: bytes, piece_bytes: int = _PIECE_BYTES) -> Iterator[bytes]:
    """Yield the open regular file `fd` as a tar entry. If it shrinks meanwhile, append zeros up to the stated size."""
    yield header(about, name, tarfile.REGTYPE, size=about.st_size)
    left = about.st_size
    while left:
        piece = os.read(fd, min(left, piece_bytes)) or bytes(min(left, piece_bytes))
        yield piece
        left -= len(piece)
    yield bytes(-about.st_size % _BLOCK)


def header(about: os.stat_result, name: bytes, kind: bytes, *, size: int = 0, link: bytes = b"") -> bytes:
    """Return the header of an entry, without owners and the setuid, setgid and sticky bits."""
    member = tarfile.TarInfo(_text(name))
    member.type, member.size, member.linkname = kind, size, _text(link)
    member.mode, member.mtime = stat.S_IMODE(about.st_mode) & 0o777, max(int(about.st_mtime), 0)
    return member.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")


def unpack(top: bytes, read: Callable[[int], bytes], rights: int = 0o777) -> None:
    """Unpack an archive into the folder `top`; create `top` if missing, and replace existing files and links.

    Symbolic links may point out of `top`, as those of a virtual environment do. They give no rights to their targets.

    Args:
        top: Path of the target folder.
        read: Returns the next bytes of the archive, as many as requested; fewer only at the end.
        rights: Mode bits that unpacked entries may have; all other bits are cleared.

    Raises:
        RefusedEntryError: The archive is malformed, or contains a device, an absolute path or a path that leads out of
            `top`.
        OSError: An entry cannot be written.
    """
    modes = []
    make_folders(top)
    for member in _members(read):
        name, mode = _bytes(member.name), member.mode & rights & 0o777
        parts = _parts(name)
        path = os.path.join(top, *parts)
        if member.isdir():
            is_new = not os.path.isdir(path)
            make_folders(path)
            modes.append((path, mode if parts else mode | 0o700, is_new))
        elif not parts:
            raise RefusedEntryError("entry without a name")
        else:
            make_folders(os.path.dirname(path))
            if os.path.lexists(path):
                os.unlink(path)
            if member.issym():
                os.symlink(_bytes(member.linkname), path)
            else:
                _unpack_file(path, member, mode, read)
    for path, mode, is_new in reversed(modes):
        try:
            os.chmod(path, mode)
        except PermissionError:
            if is_new:  # Keep the mode of an existing folder, which may belong to another user, as /tmp does.
                raise


def _unpack_file(path: bytes, member: tarfile.TarInfo, mode: int, read: Callable[[int], bytes]) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        left = member.size
        while left:
            view = memoryview(_exactly(min(left, _PIECE_BYTES), read))
            left -= len(view)
            while view:
                view = view[os.write(fd, view) :]
        os.fchmod(fd, mode)
        os.utime(fd, (member.mtime, member.mtime))
    finally:
        os.close(fd)
    _exactly(-member.size % _BLOCK, read)


def _members(read: Callable[[int], bytes]) -> Iterator[tarfile.TarInfo]:
    """Yield the header of each entry.

    The caller must read the content of a file from the archive before it takes the next entry.
    """
    long: dict[bytes, str] = {}
    while True:
        try:
            member = tarfile.TarInfo.frombuf(read(_BLOCK), "utf-8", "surrogateescape")
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            while read(_PIECE_BYTES):  # Skip the padding at the end of the archive.
                pass
            return
        except tarfile.HeaderError as error:
            raise RefusedEntryError("not a complete tar archive: %s" % error) from None
        if member.size < 0:
            raise RefusedEntryError("not a tar archive: negative size")
        if member.type in (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK):
            if member.size > _MAX_NAME_BYTES:
                raise RefusedEntryError("name too long (%d bytes, limit %d)" % (member.size, _MAX_NAME_BYTES))
            long[member.type] = _text(_exactly(member.size, read).rstrip(b"\0"))
            _exactly(-member.size % _BLOCK, read)
            continue
        member.name = long.get(tarfile.GNUTYPE_LONGNAME, member.name)
        member.linkname = long.get(tarfile.GNUTYPE_LONGLINK, member.linkname)
        if member.type not in (tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.DIRTYPE):
            raise RefusedEntryError("%s is not a file, folder or symbolic link" % member.name)
        long = {}
        yield member


def _parts(name: bytes) -> list[bytes]:
    """Split a path into components; raise `RefusedEntryError` if it leads out of the target folder."""
    parts = [part for part in name.split(b"/") if part not in (b"", b".")]
    if name.startswith(b"/") or b".." in parts or b"\0" in name:
        raise RefusedEntryError("%s leads out of the target folder" % _text(name))
    return parts


def _text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")


def _bytes(name: str) -> bytes:
    return name.encode("utf-8", "surrogateescape")


def _exactly(count: int, read: Callable[[int], bytes]) -> bytes:
    content = read(count) if count else b""
    if len(content) < count:
        raise RefusedEntryError("the archive ends early")
    return content
