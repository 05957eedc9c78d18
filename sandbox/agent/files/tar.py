"""Packs a file or folder into a tar stream (`pack`) and unpacks a tar stream (`unpack`).

Both functions have the rights of the calling process.

Python's `tarfile` is not used: it costs processor time and 2 MiB of memory in each sandbox, takes a torn archive for a
complete one, and extracts unsafely before 3.12. Files, folders and symbolic links are supported. `pack` skips devices,
sockets and pipes. `unpack` reads only archives that `pack` or `envkit.sandbox.transfer.tar_stream` has written (GNU
format), and refuses everything else.
"""

from __future__ import annotations

import errno
import os
import stat

from .files import make_folders

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_BLOCK = 512
_PIECE = 1 << 16
FILE, SYMBOLIC, FOLDER = b"0", b"2", b"5"
"""Kinds of entries."""
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
            write(header(b"/".join(steps) or b".", FOLDER, about))
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
        write(header(b"/".join(steps), SYMBOLIC, about, os.readlink(steps[-1], dir_fd=folder)))
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
    yield header(name, FILE, about)
    left = about.st_size
    while left:
        piece = os.read(fd, min(left, piece_bytes)) or bytes(min(left, piece_bytes))
        yield piece
        left -= len(piece)
    yield bytes(-about.st_size % _BLOCK)


def header(name: bytes, kind: bytes, about: os.stat_result, target: bytes = b"") -> bytes:
    """Return the header of an entry, without owners and the setuid, setgid and sticky bits."""
    long = b""
    for kind_of_long, text in ((b"K", target), (b"L", name)):
        if len(text) > 100:
            long += _block(b"././@LongLink", kind_of_long, len(text) + 1, 0o644, 0, b"")
            long += text + bytes(_BLOCK - len(text) % _BLOCK)
    size = about.st_size if kind == FILE else 0
    return long + _block(name, kind, size, about.st_mode & 0o777, int(about.st_mtime), target)


def _block(name: bytes, kind: bytes, size: int, mode: int, time_s: int, target: bytes) -> bytes:
    fields = [
        name[:100].ljust(100, b"\0"),
        _number(mode, 8) + _number(0, 8) + _number(0, 8) + _number(size, 12) + _number(max(time_s, 0), 12),
        b" " * 8,
        kind,
        target[:100].ljust(100, b"\0"),
        b"ustar  \0",
    ]
    block = b"".join(fields).ljust(_BLOCK, b"\0")
    return block[:148] + b"%06o\0 " % sum(block) + block[156:]


def _number(value: int, width: int) -> bytes:
    if value < 8 ** (width - 1):
        return b"%0*o\0" % (width - 1, value)
    return b"\x80" + value.to_bytes(width - 1, "big")


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
    for name, kind, size, mode, time_s, target in _entries(read):
        mode &= rights
        parts = _parts(name)
        path = os.path.join(top, *parts)
        if kind == FOLDER:
            is_new = not os.path.isdir(path)
            make_folders(path)
            modes.append((path, mode | 0o700 if not parts else mode, is_new))
        elif not parts:
            raise RefusedEntryError("entry without a name")
        else:
            make_folders(os.path.dirname(path))
            if os.path.lexists(path):
                os.unlink(path)
            if kind == SYMBOLIC:
                os.symlink(target, path)
            else:
                _unpack_file(path, size, mode, time_s, read)
    for path, mode, is_new in reversed(modes):
        try:
            os.chmod(path, mode)
        except PermissionError:
            if is_new:  # Keep the mode of an existing folder, which may belong to another user, as /tmp does.
                raise


def _unpack_file(path: bytes, size: int, mode: int, time_s: int, read: Callable[[int], bytes]) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        left = size
        while left:
            view = memoryview(_exactly(min(left, _PIECE), read))
            left -= len(view)
            while view:
                view = view[os.write(fd, view) :]
        os.fchmod(fd, mode)
        os.utime(fd, (time_s, time_s))
    finally:
        os.close(fd)
    _exactly(-size % _BLOCK, read)


def _entries(read: Callable[[int], bytes]) -> Iterator[tuple[bytes, bytes, int, int, int, bytes]]:
    """Yield name, kind, size, mode, time and link target of each entry.

    The caller must read the content of a file entry from the archive before it takes the next entry.
    """
    known: dict[bytes, bytes] = {}
    while True:
        block = _exactly(_BLOCK, read)
        if not block.strip(b"\0"):
            while read(_PIECE):  # Skip the padding at the end of the archive.
                pass
            return
        if _value(block[148:156]) != sum(block) - sum(block[148:156]) + 8 * 32:
            raise RefusedEntryError("not a tar archive")
        kind, size = block[156:157], _value(block[124:136])
        if kind in b"LK":
            if size > _MAX_NAME_BYTES:
                raise RefusedEntryError("name too long (%d bytes, limit %d)" % (size, _MAX_NAME_BYTES))
            content = _exactly(size, read)
            _exactly(-size % _BLOCK, read)
            known[kind] = content.rstrip(b"\0")
            continue
        name = known.get(b"L", block[:100].partition(b"\0")[0])
        target = known.get(b"K", block[157:257].partition(b"\0")[0])
        if kind not in (FILE, SYMBOLIC, FOLDER):
            raise RefusedEntryError("%s is not a file, folder or symbolic link" % os.fsdecode(name))
        known = {}
        yield name, kind, size, _value(block[100:108]) & 0o777, _value(block[136:148]), target


def _parts(name: bytes) -> list[bytes]:
    """Split a path into components; raise `RefusedEntryError` if it leads out of the target folder."""
    parts = [part for part in name.split(b"/") if part not in (b"", b".")]
    if name.startswith(b"/") or b".." in parts or b"\0" in name:
        raise RefusedEntryError("%s leads out of the target folder" % os.fsdecode(name))
    return parts


def _value(field: bytes) -> int:
    if field[:1] == b"\x80":
        return int.from_bytes(field[1:], "big")
    text = field.strip(b"\0 ")
    if not text.isdigit() and text:
        raise RefusedEntryError("not a tar archive")
    return int(text or b"0", 8)


def _exactly(count: int, read: Callable[[int], bytes]) -> bytes:
    content = read(count) if count else b""
    if len(content) < count:
        raise RefusedEntryError("the archive ends early")
    return content
