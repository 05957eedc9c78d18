"""Finds and kills whole process trees, including processes that call setsid, fork twice or ignore signals.

It stops all processes of the tree before it kills the first one, because a running process could fork meanwhile. It
repeats until no process is left. It finds orphans too, because a subreaper above them becomes their parent.
"""

from __future__ import annotations

import os
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Iterable

    from ..event_loop import Loop

    Table = dict[int, tuple[int, bool]]
else:
    import _signal as signal

_STATE, _PARENT, _THREADS = 0, 1, 17  # fields of /proc/PID/stat, counted from the field after the name
_SCANS = 50  # maximum per round, because a fork bomb may fork as fast as we scan
_ROUNDS = 200


def table() -> Table:
    """Return, by pid, each visible process's parent and whether the process is alive (not a zombie)."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                fd = os.open("/proc/" + name + "/stat", os.O_RDONLY)
                try:
                    content = os.read(fd, 4096)
                finally:
                    os.close(fd)
            except OSError:  # the process has exited
                continue
            # Search from the right, because the name in the second field may contain parentheses and spaces.
            fields = content[content.rindex(b")") + 2 :].split()
            # A process whose main thread has exited is shown as a zombie, but its other threads still run.
            found[int(name)] = (int(fields[_PARENT]), fields[_STATE] not in b"ZX" or int(fields[_THREADS]) > 1)
    return found


def alive_below(roots: Iterable[int], processes: Table) -> set[int]:
    """Return the live processes among `roots` and their descendants."""
    children: dict[int, list[int]] = {}
    for pid, (parent, _) in processes.items():
        children.setdefault(parent, []).append(pid)
    family = set()
    waiting = list(roots)
    while waiting:
        pid = waiting.pop()
        if pid not in family:
            family.add(pid)
            waiting += children.get(pid, ())
    return {pid for pid in family if pid in processes and processes[pid][1]}


def kill_once(choose: Callable[[Table], set[int]]) -> bool:
    """Stop all processes that `choose` returns, then kill them; return whether there were any."""
    stopped: set[int] = set()
    for _ in range(_SCANS):
        fresh = choose(table()) - stopped
        if not fresh:
            break
        for pid in fresh:
            _send(pid, signal.SIGSTOP)
        stopped |= fresh
    for pid in stopped:
        _send(pid, signal.SIGKILL)
    return bool(stopped)


class TreeKill:
    """Kills the processes that `choose` returns until none is left, then calls `then`.

    After `_ROUNDS` rounds (about 4 s) it gives up and calls `then` too.
    """

    def __init__(
        self, loop: Loop, choose: Callable[[Table], set[int]], then: Callable[[], None], owner: object
    ) -> None:
        self._loop = loop
        self._choose = choose
        self._then = then
        self._owner = owner
        self._round = 0
        self._check()

    def _check(self) -> None:
        self._round += 1
        if kill_once(self._choose) and self._round < _ROUNDS:
            self._loop.after(min(0.001 * self._round, 0.02), self._check, self._owner)
        else:
            self._then()


def kill_descendants() -> None:
    """Kill all descendants of this process; return when none is left, or after `_ROUNDS` rounds."""
    us = os.getpid()
    for _ in range(_ROUNDS):
        if not kill_once(lambda processes: alive_below([us], processes) - {us}):
            return
        time.sleep(0.001)
        reap()


def reap() -> dict[int, int]:
    """Reap all children that have exited; return their wait status by pid."""
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if not pid:
            return ended
        ended[pid] = status


def exit_code(status: int) -> int:
    """Convert a wait status to an exit code; the code is negative if a signal killed the process."""
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def _send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except OSError:  # the process has exited or changed its user
        pass
