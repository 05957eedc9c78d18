"""The ``exec`` call: runs one program and, when the call ends, kills every process that the program started."""

from __future__ import annotations

import fcntl
import os
import struct
import termios
import time

from ..connection import CallError, IncomingCall
from ..framing import encoded
from . import worker
from .inputs import MAX_WAITING_BYTES, Input
from .outputs import Output, OutputTail

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ..connection import Header, HostConnection
    from ..event_loop import Timer
    from ..linux import User
    from ..users import Context

_NO_START = 126
_KEEP_BYTES = 1 << 20
_TERMINAL_BYTES = 1 << 20
"""Maximum number of bytes to read from a terminal after its program has ended."""


class Exec(IncomingCall):
    """A call that runs one program in a worker process."""

    def __init__(self, context: Context, connection: HostConnection, number: int, header: Header) -> None:
        super().__init__(connection, number)
        self._context = context
        self._began = time.monotonic()
        self._streams = bool(header.get("stream"))
        keep_bytes = int(header.get("keep_bytes", _KEEP_BYTES))
        self._tails = {"out": OutputTail(keep_bytes), "err": OutputTail(keep_bytes)}
        self._outputs: list[Output] = []
        self._input: Input | None = None
        self._terminal: int | None = None
        self._held: int | None = None
        self._timer: Timer | None = None
        self._ends = False
        user = context.user(header.get("user", "agent"))
        if not isinstance(header["argv"], list):
            raise CallError("bad", "argv must be a list")
        argv = [encoded(part) for part in header["argv"]]
        env = context.environment(user, header.get("env"))
        folder = encoded(header.get("cwd") or context.start_folder(user))
        timeout_s = float(header["timeout_s"])
        size = [int(length) for length in header.get("pty") or ()]
        try:
            self._worker = context.workers.take(user)
        except OSError as error:
            self._tails["err"].add(("cannot be started: %s\n" % error.strerror).encode())
            self._finish_with_code(_NO_START)
            return
        try:
            name = self._open_terminal(user, *size) if size else b""
            takes_input = bool(header.get("stdin"))
            request = worker.encode_request(
                argv, env, folder, () if size else (0, 1, 2) if takes_input else (1, 2), name
            )
            files = [] if size else self._open_pipes(user, takes_input)
        except Exception:
            context.workers.give_back(self._worker)
            self._close_and(lambda: None)
            raise
        self._timer = context.loop.after(
            timeout_s, lambda: self._end_with(lambda: self._finish_with_code(None, timed_out=True)), self
        )
        self._worker.run(request, files, self._on_ended)

    def more(self, piece: bytes) -> None:
        if self._input is not None and not self._ends:
            self._input.add(piece)
            if self._input.waiting_bytes > MAX_WAITING_BYTES:
                self._end_with(
                    lambda: self.fail("too_large", "the program does not read its input (limit 64 MiB of unread input)")
                )

    def eof(self) -> None:
        if self._input is not None:
            if self._terminal is not None:
                self._input.add(b"\x04")
            else:
                self._input.end()

    def cancel(self) -> None:
        self._end_with(lambda: self.finish(cancelled=True))

    def crashed(self, text: str) -> None:
        self._end_with(lambda: self.fail("bad", text))

    def resize(self, rows: int, columns: int) -> None:
        """Resize the terminal of the program; raise `CallError` if the program has no terminal or has ended."""
        if self._terminal is None or self._ends:
            raise CallError("bad", "the program has no terminal")
        fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def _open_pipes(self, user: User, takes_input: bool) -> list[int]:
        """Open pipes for the program's output and, if `takes_input`, its input; return the program's ends."""
        loop = self._context.loop
        files = []
        if takes_input:
            stdin, ours = user.pipe()
            on_written = (lambda count: self.send_header(ack=count)) if self._streams else None
            self._input = Input(loop, ours, self, on_written)
            files.append(stdin)
        for of in ("out", "err"):
            ours, theirs = user.pipe()
            self._outputs.append(Output(loop, ours, self._taker(of), self))
            files.append(theirs)
        return files

    def _open_terminal(self, user: User, rows: int, columns: int) -> bytes:
        """Open a terminal that belongs to `user`; return its path, which the program opens."""
        try:
            # Keep the program's end open as well: reading `ours` fails while no process has the program's end open.
            ours, self._held = user.act(os.openpty)
        except OSError as error:
            raise CallError("unsupported", "this sandbox has no terminals: %s" % error.strerror) from None
        name = os.ttyname(self._held)
        fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self._terminal = ours
        self._input = Input(self._context.loop, os.dup(ours), self)
        self._outputs.append(Output(self._context.loop, ours, self._taker("out"), self))
        return name.encode()

    def _taker(self, of: str) -> Callable[[bytes], None]:
        """Return a callback that stores or sends pieces of the program's output stream `of` (``out`` or ``err``)."""
        if not self._streams:
            return self._tails[of].add

        def take(piece: bytes) -> None:
            self.send_piece(of, piece)
            if self.connection.is_full:
                self._pause(True)
                self.connection.when_room(lambda: self._pause(False))

        return take

    def _pause(self, paused: bool) -> None:
        for output in self._outputs:
            output.pause(paused)

    def _on_ended(self, code: int, left: bool) -> None:
        if left:
            self._end_with(lambda: self._finish_with_code(code))
        elif not self._ends:
            self._ends = True
            self._context.workers.give_back(self._worker)
            self._close_and(lambda: self._finish_with_code(code))

    def _end_with(self, then: Callable[[], None]) -> None:
        """Kill the program and every process that it started, then call `then`."""
        if not self._ends:
            self._ends = True
            self._worker.kill(lambda: self._close_and(then), self)

    def _close_and(self, then: Callable[[], None]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._held is not None:
            os.close(self._held)
            self._held = None
        for output in self._outputs:
            output.take_waiting(_TERMINAL_BYTES if self._terminal is not None else None)
            output.close()
        if self._input is not None:
            self._input.close()
        then()

    def _finish_with_code(self, code: int | None, timed_out: bool = False) -> None:
        duration_s = round(time.monotonic() - self._began, 6)
        # Report OOM kills even if this command survived, because the kernel may have killed another process.
        self._context.report_oom_kills()
        known = self._context.out_of_memory(code)
        self.finish_with_outputs(self._tails, code=code, timed_out=timed_out, duration_s=duration_s, **known)
