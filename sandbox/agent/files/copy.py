"""Copies files and folders out of the sandbox and into it, in a child process with the rights of one user.

Because the child process has no other rights, a link gives no access to other users' files. It also ensures that a huge
folder does not block other calls.
"""

from __future__ import annotations

import os

from ..connection import IncomingCall
from ..exec import worker
from ..exec.inputs import Input
from ..exec.outputs import PIECE_BYTES, Output, OutputTail
from ..framing import encoded
from . import tar

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from collections.abc import Callable

    from ..connection import Header, HostConnection
    from ..users import Context
else:
    import _signal as signal

_REASON_BYTES = 4096
_WAITING_BYTES = 4 << 20
"""Pause reading from the host while more than this number of bytes waits for the child process."""


class _Tree(IncomingCall):
    """Base class of `Pack` and `Unpack`: starts the child process that copies, and reports its result to the host."""

    def __init__(self, context: Context, connection: HostConnection, number: int, header: Header) -> None:
        super().__init__(connection, number)
        self._context = context
        self._user = context.owner(header)
        self._reason = OutputTail(_REASON_BYTES)
        self._code: int | None = None
        self._pid = 0
        self._problem: tuple[str, str] | None = None

    def cancel(self) -> None:
        self._end_early("refused", "cancelled")

    def crashed(self, text: str) -> None:
        self._end_early("bad", text)

    def _fork(self, work: Callable[[], None], theirs: list[int]) -> None:
        """Run `work` in a child process, which inherits the descriptors `theirs` and a pipe for its error text.

        This process closes its copies of `theirs`.
        """
        errors, writer = os.pipe()
        user, us = self._user, os.getpid()

        def run() -> None:
            worker.isolate(user, us, *theirs, writer, hidden=True)
            try:
                work()
            except (OSError, tar.RefusedEntryError, ValueError, OverflowError) as error:
                os.write(writer, _text(error)[:_REASON_BYTES])
                os._exit(2)

        try:
            self._pid = self._context.workers.fork(run, self._on_exit, is_charged=user.preemptible)
        finally:
            for fd in [*theirs, writer]:
                os.close(fd)
        self._errors = Output(self._context.loop, errors, self._reason.add, self)

    def _on_exit(self, code: int) -> None:
        self._code = code
        self._errors.take_waiting()
        self._errors.close()
        self._finish_when_done()

    def _finish_when_done(self) -> None:
        raise NotImplementedError

    def _end_early(self, code: str, text: str) -> None:
        if self._problem is None:
            self._problem = code, text
            if self._code is None:
                os.kill(self._pid, signal.SIGKILL)

    def _answer(self, code: str) -> None:
        if self._problem is not None:
            self.fail(*self._problem)
        elif self._code:
            text = self._reason.peek().decode(errors="replace") or "the copy process ended with code %d" % self._code
            self.fail(code, text)
        else:
            self.finish()


class Pack(_Tree):
    """A call that sends a file or folder of the sandbox to the host as a tar archive."""

    def __init__(self, context: Context, connection: HostConnection, number: int, header: Header) -> None:
        super().__init__(context, connection, number, header)
        path = context.inside(encoded(header["path"]))
        self._left = int(header["max_bytes"])
        ours, theirs = os.pipe()

        def work() -> None:
            # Buffer the archive, because every small write would wake the host.
            with open(theirs, "wb", PIECE_BYTES) as archive:
                tar.pack(path, archive.write)

        self._archive = Output(context.loop, ours, self._take, self, self._finish_when_done)
        self._fork(work, [theirs])

    def _take(self, piece: bytes) -> None:
        self._left -= len(piece)
        if self._left < 0:
            self._end_early("too_large", "the archive has more bytes than `max_bytes`")
        if self._problem is None:
            self.send_piece("data", piece)
            if self.connection.is_full:
                self._archive.pause(True)
                self.connection.when_room(lambda: self._archive.pause(False))

    def _finish_when_done(self) -> None:
        if self._code is not None and not self._archive.is_open and not self.is_over:
            self._answer("missing")


class Unpack(_Tree):
    """A call that receives a tar archive from the host and unpacks it into a folder of the sandbox."""

    def __init__(self, context: Context, connection: HostConnection, number: int, header: Header) -> None:
        super().__init__(context, connection, number, header)
        path = context.inside(encoded(header["path"]))
        theirs, ours = os.pipe()

        def work() -> None:
            with open(theirs, "rb", PIECE_BYTES) as archive:
                tar.unpack(path, archive, self._user.rights)

        self._archive = Input(context.loop, ours, self, on_written=self._on_written)
        self._fork(work, [theirs])

    def more(self, piece: bytes) -> None:
        self._archive.add(piece)
        if self._archive.waiting_bytes > _WAITING_BYTES:
            self.connection.hold(self, True)

    def eof(self) -> None:
        self._archive.end()

    def _on_written(self, count: int) -> None:
        if self._archive.waiting_bytes <= _WAITING_BYTES:
            self.connection.hold(self, False)

    def _finish_when_done(self) -> None:
        self._archive.close()
        self.connection.hold(self, False)
        if not self.is_over:
            self._answer("refused")


def _text(error: Exception) -> bytes:
    if isinstance(error, OSError) and error.strerror:
        name = error.filename if error.filename is not None else b""
        return os.fsencode(name) + b": " * bool(name) + error.strerror.encode()
    return str(error).encode(errors="replace")
