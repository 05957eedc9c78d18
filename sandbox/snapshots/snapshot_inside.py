"""Program that packs and unpacks the files of a snapshot inside a sandbox.

The stream contains one record for each name. A folder's record precedes those of its entries. Sparse files and hard
links are preserved. Some entries are skipped: devices, sockets, pipes, other file systems, files of other users that
cannot be read, and files that are deleted during the snapshot. If a file's mode forbids its own user to read it, the
mode is changed temporarily, and the record has the original mode.

    record      kind (one byte: d, f, l, h, e), mode, mtime in ns, size, length of the name; the absolute name
    f           file: pieces follow, each with offset, length and content; the last has length 0
    d           folder
    l, h        symbolic or hard link: `size` bytes follow, with the link's target or the file's first name
    e           end of the stream

It needs only Python 3.7 and the standard library, because the sandbox's Python runs it:

    python -I -S -c SOURCE pack|unpack UID ROOT...

If started as root, it switches to the rights of user UID, but with another real uid, so that programs of the sandbox
cannot send it signals.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import BinaryIO

_RECORD = struct.Struct(">cHqQI")
_PIECE = struct.Struct(">QI")
_PIECE_BYTES = 1 << 18
_MAX_NAME_BYTES = 1 << 16
_TO_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_NOFOLLOW
_MAX_TIME_NS = (1 << 63) - 1
_HIDDEN_UID = 1002
"""A uid that no user of a sandbox has; the same as in `envkit.sandbox.agent.linux`."""


def pack(roots: list[bytes], write: Callable[[bytes], object]) -> None:
    """Write the folders `roots` with all their contents as a stream.

    Raises:
        OSError: An entry cannot be read.
    """
    first_names: dict[tuple[int, int], bytes] = {}
    closed: dict[bytes, int] = {}
    for root in roots:
        device = os.lstat(root).st_dev
        waiting = [(os.path.dirname(root), [os.path.basename(root)])]
        while waiting:
            folder, names = waiting[-1]
            try:
                if not names:
                    waiting.pop()
                    if folder in closed:
                        os.chmod(folder, closed.pop(folder))
                    continue
                path = os.path.join(folder, names.pop())
                about = os.lstat(path)
                if about.st_dev != device or _is_closed(path, about):
                    continue
                if stat.S_ISDIR(about.st_mode):
                    if about.st_uid == os.geteuid() and about.st_mode & 0o500 != 0o500:
                        closed[path] = stat.S_IMODE(about.st_mode)
                        os.chmod(path, closed[path] | 0o500)
                    inner = sorted(os.listdir(path), reverse=True)
                    write(_record(b"d", about, path))
                    waiting.append((path, inner))
                elif stat.S_ISLNK(about.st_mode):
                    target = os.readlink(path)
                    write(_record(b"l", about, path, len(target)) + target)
                elif stat.S_ISREG(about.st_mode):
                    first = first_names.get((about.st_dev, about.st_ino))
                    if first is not None:
                        write(_record(b"h", about, path, len(first)) + first)
                        continue
                    _pack_file(path, write)
                    if about.st_nlink > 1:
                        first_names[about.st_dev, about.st_ino] = path
            except (FileNotFoundError, PermissionError):  # deleted, or in another user's folder
                pass
    write(_RECORD.pack(b"e", 0, 0, 0, 0))


def _is_closed(path: bytes, about: os.stat_result) -> bool:
    """Return whether a file or folder belongs to another user, such as a grader, and cannot be read."""
    if about.st_uid == os.geteuid() or not (stat.S_ISDIR(about.st_mode) or stat.S_ISREG(about.st_mode)):
        return False
    try:
        os.close(os.open(path, _TO_READ))
    except PermissionError:
        return True
    return False


def _pack_file(path: bytes, write: Callable[[bytes], object]) -> None:
    about = os.lstat(path)
    mode = stat.S_IMODE(about.st_mode)
    is_closed = about.st_uid == os.geteuid() and not mode & 0o400
    if is_closed:
        os.chmod(path, mode | 0o400)
    fd = os.open(path, _TO_READ)
    try:
        if is_closed:
            os.fchmod(fd, mode)
        about = os.fstat(fd)
        if not stat.S_ISREG(about.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        write(_record(b"f", about, path, about.st_size))
        for begin, end in _written(fd, about.st_size):
            while begin < end:
                piece = os.pread(fd, min(end - begin, _PIECE_BYTES), begin)
                if not piece:  # the file was truncated during the snapshot
                    break
                write(_PIECE.pack(begin, len(piece)))
                write(piece)
                begin += len(piece)
        write(_PIECE.pack(0, 0))
    finally:
        os.close(fd)


def _written(fd: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield the start and end offset of each part of a sparse file that is not a hole."""
    end = 0
    while end < size:
        try:
            begin = os.lseek(fd, end, os.SEEK_DATA)
            end = min(os.lseek(fd, begin, os.SEEK_HOLE), size)
        except OSError as error:
            if error.errno == errno.EINVAL:  # the file system does not support holes
                yield end, size
            elif error.errno != errno.ENXIO:
                raise
            return
        yield begin, end


def _record(kind: bytes, about: os.stat_result, path: bytes, size: int = 0) -> bytes:
    time_ns = max(min(about.st_mtime_ns, _MAX_TIME_NS), 0)
    return _RECORD.pack(kind, stat.S_IMODE(about.st_mode) & 0o777, time_ns, size, len(path)) + path


def unpack(roots: list[bytes], read: Callable[[int], bytes]) -> None:
    """Restore the entries of a stream that `pack` has written. Existing files and links are replaced.

    The record of a folder must precede those of its entries, so that symbolic links are not followed.

    Args:
        roots: Folders that all entries must be in.
        read: Returns the requested number of bytes, or fewer at the end of the stream.

    Raises:
        ValueError: The stream is invalid.
        OSError: An entry cannot be written.
    """
    modes: dict[bytes, int] = {}
    while True:
        kind, mode, time_ns, size, length = _RECORD.unpack(_exactly(_RECORD.size, read))
        if kind == b"e":
            break
        if max(length, 0 if kind == b"f" else size) > _MAX_NAME_BYTES:
            raise ValueError("a name of %d bytes" % max(length, size))
        path = _exactly(length, read)
        folder, name = os.path.split(path)
        if path not in roots and (folder not in modes or name in (b"", b".", b"..")):
            raise ValueError("%s is out of place" % os.fsdecode(path))
        mode &= 0o777
        if kind == b"d":
            if not os.path.isdir(path) or os.path.islink(path):
                _clear(path)
                os.mkdir(path, 0o700)
            modes[path] = mode
        elif path in roots:
            raise ValueError("%s is no folder" % os.fsdecode(path))
        elif kind == b"f":
            _clear(path)
            _unpack_file(path, size, mode, time_ns, read)
        elif kind in (b"l", b"h"):
            target = _exactly(size, read)
            _clear(path)
            if kind == b"l":
                os.symlink(target, path)
            elif os.path.dirname(target) not in modes:
                raise ValueError("%s is out of place" % os.fsdecode(target))
            else:
                os.link(target, path, follow_symlinks=False)
        else:
            raise ValueError("a record of kind %r" % kind)
    for path in reversed(list(modes)):
        if os.lstat(path).st_uid == os.geteuid():  # /tmp and mounts in it may have another owner
            os.chmod(path, modes[path] | (0o700 if path in roots else 0))


def _unpack_file(path: bytes, size: int, mode: int, time_ns: int, read: Callable[[int], bytes]) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        os.ftruncate(fd, size)
        while True:
            begin, length = _PIECE.unpack(_exactly(_PIECE.size, read))
            if length == 0:
                break
            if length > _PIECE_BYTES or begin + length > size:
                raise ValueError("a piece beyond the end of %s" % os.fsdecode(path))
            view = memoryview(_exactly(length, read))
            while view:
                count = os.pwrite(fd, view, begin)
                begin, view = begin + count, view[count:]
        os.fchmod(fd, mode)
        os.utime(fd, ns=(time_ns, time_ns))
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from None
    finally:
        os.close(fd)


def _clear(path: bytes) -> None:
    if os.path.lexists(path):
        os.unlink(path)


def _exactly(count: int, read: Callable[[int], bytes]) -> bytes:
    content = read(count) if count else b""
    if len(content) < count:
        raise ValueError("the snapshot ends early")
    return content


def _become(uid: int) -> None:
    """Switch to the rights of a user, irrevocably. Afterwards only root can send signals to this process."""
    if os.getuid() == 0 and uid:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(_HIDDEN_UID, uid, _HIDDEN_UID)


def main(do: str, uid: str, *roots: str) -> int:
    """Pack or unpack, and return an exit code; errors are written to standard error."""
    roots_bytes = [os.fsencode(root) for root in roots]
    files: list[BinaryIO] = [sys.stdin.buffer, sys.stdout.buffer]
    try:
        _become(int(uid))
        if do == "pack":
            pack(roots_bytes, files[1].write)
            files[1].flush()
        else:
            unpack(roots_bytes, files[0].read)
    except OSError as error:
        name = os.fsdecode(error.filename) + ": " if error.filename is not None else ""
        print(ascii(name + (error.strerror or ""))[1:-1], file=sys.stderr)
        return 1
    except (ValueError, OverflowError) as error:
        print(ascii(str(error))[1:-1], file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
