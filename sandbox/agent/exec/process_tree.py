"""Finds and kills whole process trees, including processes that call setsid, fork twice or ignore signals.

All processes of the tree are stopped (SIGSTOP) before the first is killed, because a process that still runs could
fork while others are killed. Both steps are repeated until no process is left. Processes whose parents have ended are
found too, because the kernel makes them children of a subreaper in the tree.
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

# Indexes of fields in /proc/PID/stat, counted from the field after the process name.
_STATE, _PARENT, _THREADS = 0, 1, 17
# Maximum number of scans of /proc per round of a kill, because a fork bomb may fork as fast as we scan.
_SCANS = 50
_ROUNDS = 200


def table() -> Table:
    """Return a dict from the pid of each visible process to its parent's pid and whether it is alive (no zombie)."""
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
    """Return the pids of the live processes among `roots` and their descendants."""
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
    """Send SIGSTOP, then SIGKILL to the processes that `choose` selects; return whether there were any."""
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


def kill_tree(
    loop: Loop, choose: Callable[[Table], set[int]], then: Callable[[], None], owner: object, count: int = 1
) -> None:
    """Kill the processes that `choose` selects from the process table, and call `then` when no process is left.

    Kills in rounds, because the processes need time to exit. `count` is the number of the round. After 200 rounds
    (about 4 s), gives up and calls `then`.
    """
    if kill_once(choose) and count < _ROUNDS:
        delay_s = min(0.001 * count, 0.02)
        loop.after(delay_s, lambda: kill_tree(loop, choose, then, owner, count + 1), owner)
    else:
        then()


def kill_descendants() -> None:
    """Kill all descendants of this process. Returns when no descendant is left, or after 200 attempts."""
    us = os.getpid()
    kill_all(lambda processes: alive_below([us], processes) - {us}, reap)


def kill_all(choose: Callable[[Table], set[int]], reap_ended: Callable[[], object]) -> bool:
    """Kill the processes that `choose` selects, and wait until they are gone; return whether there were any.

    Calls `reap_ended` after each attempt, and gives up after 200 attempts.
    """
    for count in range(_ROUNDS):
        if not kill_once(choose):
            return count > 0
        time.sleep(0.001)
        reap_ended()
    return True


def reap() -> dict[int, int]:
    """Reap all children that have exited; return a dict from their pids to their wait statuses."""
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
    """Convert a wait status to an exit code, or to minus the signal number if a signal killed the process."""
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def _send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except OSError:  # The process has exited, or it has changed its user and we may not signal it.
        pass
