"""Calls that read or write one file. They have one user's rights, so links give no access to other users' files."""

from __future__ import annotations

import errno
import os
import stat

from ..connection import CallError, IncomingCall
from ..framing import MAX_BODY_BYTES, encoded

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..connection import Header, HostConnection
    from ..users import Context

_TRIES = 100
_MAX_PATH = 4096
"""Linux refuses longer paths."""


class Read(IncomingCall):
    """A call that sends a file's content to the host, as fast as the host reads it."""

    def __init__(self, context: Context, connection: HostConnection, number: int, header: Header) -> None:
        super().__init__(connection, number)
        path = encoded(header["path"])
        self._max_bytes = int(header["max_bytes"])
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        try:
            self._fd = context.owner(header).act(lambda: os.open(context.inside(path), flags))
        except (OSError, ValueError) as error:
            raise CallError("missing", _reason(error)) from None
        about = os.fstat(self._fd)
        if not stat.S_ISREG(about.st_mode) or about.st_size > self._max_bytes:
            os.close(self._fd)
            if stat.S_ISREG(about.st_mode):
                raise CallError("too_large", "the file has %d bytes, more than `max_bytes`" % about.st_size)
            raise CallError("missing", "is a folder" if stat.S_ISDIR(about.st_mode) else "is not a regular file")
        self._stopped = False
        connection.feed(self._frames())

    def cancel(self) -> None:
        self._stopped = True

    def _frames(self) -> Iterator[bytes]:
        """Yield the file's content as frames. Read to the end, because stat reports size 0 for files in /proc."""
        size = 0
        problem = None
        try:
            while not self._stopped and self.connection.is_open:
                piece = os.read(self._fd, MAX_BODY_BYTES)
                if not piece:
                    break
                size += len(piece)
                if size > self._max_bytes:
                    problem = CallError("too_large", "the file has more than %d bytes" % self._max_bytes)
                    break
                yield from self.pieces("data", piece)
        except OSError as error:
            problem = CallError("missing", _reason(error))
        finally:
            os.close(self._fd)
        if problem is None:
            self.finish()
        else:
            self.fail(problem.code, str(problem))


class Write(IncomingCall):
    """A call that writes a file: writes a temporary file in the file's folder, and renames it at the end of input."""

    def __init__(self, context: Context, connection: HostConnection, number: int, header: Header) -> None:
        super().__init__(connection, number)
        self._user = context.owner(header)
        self._path = context.inside(encoded(header["path"]))
        mode = header.get("mode")
        self._mode = 0o644 & self._user.rights if mode is None else int(mode) & 0o777
        self._fd: int | None = None
        try:
            self._temporary, self._fd = self._user.act(self._open)
        except (OSError, ValueError) as error:
            raise CallError("refused", _reason(error)) from None

    def more(self, piece: bytes) -> None:
        view = memoryview(piece)
        try:
            while view and self._fd is not None:
                view = view[os.write(self._fd, view) :]
        except OSError as error:
            self._drop()
            self.fail("refused", _reason(error))

    def eof(self) -> None:
        try:
            self._user.act(self._place)
        except (OSError, ValueError) as error:
            self._drop()
            self.fail("refused", _reason(error))
        else:
            self.finish()

    def cancel(self) -> None:
        self._drop()
        self.finish(cancelled=True)

    def _open(self) -> tuple[bytes, int]:
        folder, name = os.path.split(self._path)
        if not name or os.path.isdir(self._path):
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
        make_folders(folder, 0o755 & self._user.rights)
        for count in range(_TRIES):
            temporary = os.path.join(folder, b".%d-%d.part" % (self._number, count))
            try:
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
                return temporary, os.open(temporary, flags, 0o600)
            except FileExistsError:
                pass
        raise OSError(errno.EEXIST, os.strerror(errno.EEXIST))

    def _place(self) -> None:
        assert self._fd is not None
        os.fchmod(self._fd, self._mode)
        os.close(self._fd)
        self._fd = None
        os.rename(self._temporary, self._path)

    def _drop(self) -> None:
        """Remove the temporary file."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
        try:
            self._user.act(lambda: os.unlink(self._temporary))
        except OSError:
            pass


def make_folders(folder: bytes, mode: int = 0o777) -> None:
    """Create `folder` and its missing parents, without recursion, because a path can have thousands of components."""
    if len(folder) >= _MAX_PATH:
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
    missing = []
    while folder and not os.path.isdir(folder):
        missing.append(folder)
        folder = os.path.dirname(folder)
    for folder in reversed(missing):
        try:
            os.mkdir(folder, mode)
        except FileExistsError:
            if not os.path.isdir(folder):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), folder) from None


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
