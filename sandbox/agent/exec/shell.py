"""Persistent shells: one bash process runs scripts one after another and keeps its working directory, variables and
functions.

Bash reads scripts from descriptor 9 and writes their exit codes to descriptor 8, so the agent need not guess from the
output when a script has ended. While a script runs, both descriptors are closed and standard input is empty. The reply
contains the output until the end of the script. The agent does not wait for the script's background jobs.

A hostile script can still reach descriptor 8 through /proc and write an exit code before it ends. Scripts are therefore
numbered. If a shell writes anything except one exit code with the number of the current script, the agent ends the
shell, because the agent can no longer tell which script the output belongs to.
"""

from __future__ import annotations

import os
import time

from ..connection import CallError, IncomingCall
from ..framing import encoded
from . import process_tree, worker
from .inputs import Input
from .outputs import Output, OutputTail
from .workers import LOST

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ..connection import Header, HostConnection
    from ..event_loop import Timer
    from ..linux import User
    from ..users import Context
    from .process_tree import Table
    from .workers import Worker

_SCRIPTS, _CODES = 9, 8
# This loop reads and runs the scripts. `read -N` counts bytes only in the C locale. The loop sets this locale only for
# scripts that are not ASCII, because a change of the locale makes a script 20 % slower. `_envkit_was` sets `$?` to the
# exit code of the previous script. It is called in a condition: after `set -e`, a failing command outside a condition
# would end the shell. The loop discards its own standard error, because after `set -x` bash would print its commands.
_LOOP = b"""_envkit_head=
_envkit_was() { return "$1"; }
while { _envkit_code=$?
[[ $_envkit_head ]] && builtin printf '%s %s\\0' "${_envkit_head:0:9}" "$_envkit_code" >&8
IFS= builtin read -r -N 19 -u 9 _envkit_head &&
if [[ ${_envkit_head:18} == a ]]
then IFS= builtin read -r -N "${_envkit_head:9:9}" -u 9 _envkit_script
else LC_ALL=C IFS= builtin read -r -N "${_envkit_head:9:9}" -u 9 _envkit_script
fi; } 2>/dev/null
do if { _envkit_was "$_envkit_code"; } 2>/dev/null
then builtin eval "$_envkit_script" 8>&- 9<&-
else builtin eval "$_envkit_script" 8>&- 9<&-
fi
done"""
_INTERRUPT_S = 0.4
"""How long an interrupted script may take to end before its shell is killed."""
_KEEP_BYTES = 1 << 20
_CODE_DIGITS = 3
_DISCARDED = b"a script has written to the shell's own descriptors; the shell was ended\n"


class ShellCall(IncomingCall):
    """A call that runs one script in a shell."""

    def __init__(self, shell: PersistentShell, connection: HostConnection, number: int, header: Header) -> None:
        super().__init__(connection, number)
        self._shell = shell
        self.script = encoded(header["command"]) + b"\n"
        if b"\0" in self.script:
            raise CallError("bad", "a script cannot contain NUL")
        self.timeout_s = float(header["timeout_s"])
        self.keep_bytes = int(header.get("keep_bytes", _KEEP_BYTES))

    def cancel(self) -> None:
        self._shell.cancel(self)

    def crashed(self, text: str) -> None:
        self._shell.crashed(text)


class PersistentShell:
    """One bash process and its queue of scripts. Bash is started when the first script arrives."""

    def __init__(self, context: Context, user: User) -> None:
        self._context = context
        self._user = user
        self._waiting: list[ShellCall] = []
        self._current: ShellCall | None = None
        self._began = 0.0
        self._timer: Timer | None = None
        self._worker: Worker | None = None
        self._scripts: Input | None = None
        self._pid = 0
        self._tails = {"out": OutputTail(_KEEP_BYTES), "err": OutputTail(_KEEP_BYTES)}
        self._outputs: list[Output] = []
        self._stopping: list[Callable[[], None]] | None = None
        self._codes = bytearray()
        self._number = 0
        self._interrupted: str | None = None
        self._ended_code: int | None = None

    def run(self, call: ShellCall) -> None:
        """Queue a script. It runs when all earlier scripts of this shell have ended."""
        self._waiting.append(call)
        if self._current is None:
            self._next()

    def cancel(self, call: ShellCall) -> None:
        """Unqueue a script; if it runs already, kill its processes, and the whole shell if the script does not end."""
        if call is self._current:
            self._interrupt("cancelled")
        elif call in self._waiting:
            self._waiting.remove(call)
            call.finish(cancelled=True)

    def crashed(self, text: str) -> None:
        """End the shell because the agent's own code raised an exception; the next script starts a new bash."""
        self._stop(lambda: None)
        call, self._current = self._current, None
        if call is not None and not call.is_over:
            call.fail("bad", text)
        self._next()

    def close(self, then: Callable[[], None]) -> None:
        """Fail the queued scripts, end bash and all processes that it started, then call `then`."""
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            call.fail("refused", "the shell was closed")

        def closed() -> None:
            if self._current is not None:
                self._answer(LOST, lost=True)
            then()

        self._stop(closed)

    def _next(self) -> None:
        if not self._waiting or self._stopping is not None:
            return
        call = self._current = self._waiting.pop(0)
        self._began = time.monotonic()
        self._interrupted = None
        for tail in self._tails.values():
            tail.limit = call.keep_bytes
        if self._ended_code is not None:  # Bash ended after the last script and before this one.
            code, self._ended_code = self._ended_code, None
            self._tails["err"].add(b"the shell had ended before this command\n")
            self._answer(code, lost=True)
            return
        try:
            if self._worker is None:
                self._start()
        except (CallError, OSError) as error:
            self._current = None
            call.fail(error.code if isinstance(error, CallError) else "bad", str(error))
            self._next()
            return
        del self._codes[:]
        self._number = (self._number + 1) % 10**9
        self._timer = self._context.loop.after(call.timeout_s, lambda: self._interrupt("timed out"), self)
        assert self._scripts is not None
        kind = b"a" if call.script.isascii() else b"b"
        self._scripts.add(b"%09d%09d%s%s" % (self._number, len(call.script), kind, call.script))

    def _start(self) -> None:
        context = self._context
        bash = context.find("bash")
        request = worker.encode_request(
            [bash, b"--norc", b"--noprofile", b"-c", _LOOP, b"bash"],
            context.environment(self._user),
            encoded(context.start_folder(self._user)),
            (0, 1, 2, _CODES, _SCRIPTS),
            wants_pid=True,
        )
        exec_worker = context.workers.take(self._user)
        theirs: list[int] = []
        try:
            theirs.append(os.open(os.devnull, os.O_RDONLY))
            for take in (self._tails["out"].add, self._tails["err"].add, self._on_code):
                ours, other = os.pipe() if take == self._on_code else self._user.pipe()
                theirs.append(other)
                self._outputs.append(Output(context.loop, ours, take, self))
            script, ours = os.pipe()
            theirs.append(script)
            self._scripts = Input(context.loop, ours, self)
        except OSError:
            context.workers.give_back(exec_worker)
            for fd in theirs:
                os.close(fd)
            self._close_files()
            raise
        self._worker = exec_worker
        exec_worker.run(request, theirs, self._on_ended, self._on_started)

    def _on_started(self, pid: int) -> None:
        self._pid = pid

    def _on_code(self, piece: bytes) -> None:
        self._codes += piece
        head = b"%09d " % self._number
        received = bytes(self._codes)
        code, end, more = received[len(head) :].partition(b"\0")
        if self._current is None or received[: len(head)] != head[: len(received)] or len(code) > _CODE_DIGITS or more:
            self._discard()
        elif self._interrupted is None and end:
            self._answer(int(code) if code.isdigit() else 1, lost=False)

    def _discard(self) -> None:
        """End the shell after an invalid exit code, and drop its output, which may belong to an earlier script."""
        if self._worker is None:  # the shell has already ended
            return

        def ended() -> None:
            for tail in self._tails.values():
                tail.take()
            if self._current is None:
                self._ended_code = LOST
                return
            self._tails["err"].add(_DISCARDED)
            if self._interrupted is not None:
                self._answer_interrupted(lost=True)
            else:
                self._answer(LOST, lost=True)

        self._stop(ended)

    def _on_ended(self, code: int, left: bool) -> None:
        """End the current script with the exit code of bash, because bash has ended."""

        def ended() -> None:
            if self._current is None:
                self._ended_code = code
            elif self._interrupted is not None:
                self._answer_interrupted(lost=True)
            else:
                self._answer(code, lost=True)

        self._stop(ended, keeps_worker=not left)

    def _interrupt(self, why: str) -> None:
        """Kill the current script's processes until the script ends; end the shell if that takes over 0.4 s."""
        if self._interrupted is not None or self._worker is None:
            return
        self._interrupted = why
        deadline = time.monotonic() + _INTERRUPT_S
        exec_worker, pid = self._worker, self._pid

        def check() -> None:
            if self._worker is not exec_worker or self._interrupted is None:
                return  # The shell has ended by itself.
            is_quiet = not process_tree.kill_once(self._doomed)
            if is_quiet and b"\0" in self._codes:
                self._answer_interrupted(lost=False)
            elif time.monotonic() > deadline or not pid:
                self._stop(lambda: self._answer_interrupted(lost=True))
            else:
                self._context.loop.after(0.002, check, self)

        check()

    def _doomed(self, running: Table) -> set[int]:
        """Return the pids that an interrupt kills: the live descendants of bash in the process table `running`."""
        assert self._worker is not None
        return process_tree.alive_below([self._worker.pid], running) - {self._worker.pid, self._pid}

    def _stop(self, then: Callable[[], None], keeps_worker: bool = False) -> None:
        """End bash and all its descendants, then call `then`. If `keeps_worker`, they have ended already."""
        if self._stopping is not None:
            self._stopping.append(then)
            return
        exec_worker, self._worker, self._pid = self._worker, None, 0
        self._stopping = [then]

        def stopped() -> None:
            self._close_files()
            waiting, self._stopping = self._stopping, None
            for callback in waiting or ():
                callback()
            self._context.loop.soon(self._next_if_idle, self)

        if exec_worker is None:
            stopped()
        elif keeps_worker:
            self._context.workers.give_back(exec_worker)
            stopped()
        else:
            exec_worker.kill(stopped, self)

    def _close_files(self) -> None:
        for output in self._outputs:
            output.take_waiting()
            output.close()
        self._outputs = []
        if self._scripts is not None:
            self._scripts.close()

    def _answer_interrupted(self, lost: bool) -> None:
        is_late = self._interrupted == "timed out"
        self._answer(None if is_late else LOST, lost=lost, timed_out=is_late)

    def _answer(self, code: int | None, *, lost: bool, timed_out: bool = False) -> None:
        call, self._current = self._current, None
        self._interrupted = None
        if self._timer is not None:
            self._timer.cancel()
        for output in self._outputs[:2]:
            output.take_waiting()
        assert call is not None
        call.finish_with_outputs(
            self._tails,
            code=code,
            timed_out=timed_out,
            duration_s=round(time.monotonic() - self._began, 6),
            state="lost" if lost else "kept",
            **self._context.out_of_memory(code),
        )
        self._context.loop.soon(self._next_if_idle, self)

    def _next_if_idle(self) -> None:
        if self._current is None:
            self._next()
