"""Runs a program and ends all its processes: ``supervise.py PARENT-PID PROGRAM ARGUMENT...``.

This process must be the leader of a session. It ends the processes of the session when the parent exits or is killed,
at SIGTERM, and, with SIGKILL, when the program exits or is killed. Programs such as vLLM leave processes behind when
they are killed, and can ignore SIGTERM while they start. The exit code is that of the program; a signal that killed the
program also kills this process.

It is started as a file, without the packages of envkit, so it imports only the standard library.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

TERM_S = 10.0
"""Seconds for processes to end after SIGTERM."""
_KILL_S = 4.0
"""Seconds for processes to end after SIGKILL, and for the resource tracker when the others have been killed."""
_POLL_S = 0.1
_TRACKER = b"multiprocessing.resource_tracker"
"""Part of the command line of the process that removes the shared memory of the others when they have ended."""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_SIGNALS = (signal.SIGTERM, signal.SIGCHLD)
_NOT_FOUND = 127


def run(argv: list[str]) -> int:
    """Run the program until it exits or SIGTERM arrives, end all processes, and return the program's `returncode`."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # the zombies of a killed program become children of this process
    try:
        program = subprocess.Popen(argv, preexec_fn=_prepare_program)
    except OSError as error:
        print(f"cannot run {argv[0]}: {error.strerror}", file=sys.stderr)
        return _NOT_FOUND
    while program.poll() is None and signal.sigwait(_SIGNALS) != signal.SIGTERM:
        pass
    if program.poll() is None:
        program.terminate()
        wait_gone(os.getpid(), TERM_S)
    end_group(os.getpid(), term_s=0)
    returncode = program.poll() or 0
    _kill_children()
    return returncode


def main(parent_pid: int, argv: list[str]) -> None:
    """Run the program, and exit as it did. Do nothing if the parent has exited already."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent_pid:
        sys.exit("the parent process has exited")
    returncode = run(argv)
    if returncode < 0:
        if (number := -returncode) != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
        os.kill(os.getpid(), number)
    sys.exit(returncode)


def end_group(group: int, *, term_s: float = TERM_S) -> None:
    """End all processes of `group` except this one: SIGTERM, and after `term_s` seconds SIGKILL.

    The process that removes shared memory gets SIGKILL last, and only if it does not end after the others.
    """
    _signal(members(group), signal.SIGTERM, signal.SIGCONT)
    if not wait_gone(group, term_s):
        _signal([pid for pid in members(group) if not _is_tracker(pid)], signal.SIGKILL)
        if not wait_gone(group, _KILL_S):
            _signal(members(group), signal.SIGKILL)
            wait_gone(group, _KILL_S)


def wait_gone(group: int, timeout_s: float) -> bool:
    """Wait up to `timeout_s` seconds until `group` has no process but this one; return whether that is so."""
    end_s = time.monotonic() + timeout_s
    while members(group):
        if time.monotonic() > end_s:
            return False
        time.sleep(_POLL_S)
    return True


def members(group: int) -> list[int]:
    """Return the pids of this user's processes in the session and process group `group`.

    Zombies and the calling process are left out.
    """
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
    return [pid for pid in pids if pid != os.getpid() and _is_member(pid, group)]


def _kill_children() -> None:
    """Kill the processes that have left the session; when one ends, its children become children of this process."""
    end_s = time.monotonic() + _KILL_S
    with suppress(ChildProcessError):
        while time.monotonic() < end_s:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
                os.kill(int(pid), signal.SIGKILL)  # a child that was not waited for, so its pid is not reused
            time.sleep(0.1)


def _prepare_program() -> None:
    """Set up the child between fork and exec. This is safe, because this process has one thread."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        sys.exit(f"prctl {option}: {os.strerror(ctypes.get_errno())}")


def _signal(pids: list[int], *numbers: signal.Signals) -> None:
    for pid in pids:
        for number in numbers:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)


def _is_member(pid: int, group: int) -> bool:
    with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        is_theirs = fields[0] not in ("Z", "X") and fields[2:4] == [str(group), str(group)]
        return is_theirs and Path(f"/proc/{pid}").stat().st_uid == os.geteuid()
    return False


def _is_tracker(pid: int) -> bool:
    with suppress(FileNotFoundError, ProcessLookupError):
        return _TRACKER in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
