"""The ``forward`` call: connects to a server inside the sandbox and forwards data between the server and the host.

Agent and host each send at most 256 KiB without an acknowledgement, so a slow reader does not block other calls.
"""

from __future__ import annotations

import errno
import os
from _socket import AF_INET, AF_UNIX, SHUT_WR, SO_ERROR, SOCK_STREAM, SOL_SOCKET, socket

from .connection import CallError, IncomingCall
from .exec.inputs import Input
from .framing import MAX_BODY_BYTES, encoded

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .connection import Header, HostConnection
    from .users import Context

_WINDOW_BYTES = 256 << 10


class Forward(IncomingCall):
    """A call that forwards one connection."""

    def __init__(self, context: Context, connection: HostConnection, number: int, header: Header) -> None:
        super().__init__(connection, number)
        path = header.get("socket")
        self._loop = context.loop
        self._unacknowledged = 0
        self._is_read = False
        self._input: Input | None = None
        self._socket = socket(AF_INET if path is None else AF_UNIX, SOCK_STREAM)
        self._socket.setblocking(False)
        if path is None:
            problem = self._socket.connect_ex(("127.0.0.1", int(header["port"])))
        else:
            target = context.inside(encoded(path))
            problem = context.users["agent"].act(lambda: self._socket.connect_ex(target))
        if problem not in (0, errno.EINPROGRESS):
            self._socket.close()
            raise CallError("unreachable", os.strerror(problem))
        self._watch = self._loop.watch(
            self._socket.fileno(), on_read=self._read, on_write=self._on_connected, owner=self
        )
        self._watch.want(write=True)

    def more(self, piece: bytes) -> None:
        if self._input is not None:
            self._input.add(piece)

    def eof(self) -> None:
        if self._input is not None:
            self._input.end()

    def ack(self, count: int) -> None:
        self._unacknowledged -= count
        if not self._is_read:
            self._watch.want(read=self._unacknowledged < _WINDOW_BYTES)

    def cancel(self) -> None:
        self._close()
        self.finish()

    def crashed(self, text: str) -> None:
        self._close()
        super().crashed(text)

    def _on_connected(self) -> None:
        problem = self._socket.getsockopt(SOL_SOCKET, SO_ERROR)
        if problem:
            self._close()
            self.fail("unreachable", os.strerror(problem))
            return
        self._watch.want(read=True, write=False)
        self._input = Input(
            self._loop,
            os.dup(self._socket.fileno()),
            self,
            on_written=lambda count: self.send_header(ack=count),
            on_closed=self._on_written_all,
        )
        self.send_piece("open", b"")

    def _read(self) -> None:
        most = min(MAX_BODY_BYTES, _WINDOW_BYTES - self._unacknowledged)
        try:
            piece = self._socket.recv(most)
        except BlockingIOError:
            return
        except OSError:
            piece = b""
        if piece:
            self._unacknowledged += len(piece)
            self._watch.want(read=self._unacknowledged < _WINDOW_BYTES)
            self.send_piece("data", piece)
        else:
            self._is_read = True
            self._watch.want(read=False)
            self.send_header(eof=True)
            self._finish_when_over()

    def _on_written_all(self) -> None:
        if not self.is_over:
            try:
                self._socket.shutdown(SHUT_WR)
            except OSError:  # The server has already closed the connection.
                pass
            self._finish_when_over()

    def _finish_when_over(self) -> None:
        if self._is_read and self._input is not None and not self._input.is_open and not self.is_over:
            self._close()
            self.finish()

    def _close(self) -> None:
        self.is_over = True
        self._watch.close()
        if self._input is not None:
            self._input.close()
        self._socket.close()
