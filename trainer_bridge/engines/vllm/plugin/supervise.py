"""Runs a vLLM server and ends all its processes: ``supervise.py PARENT-PID ARGUMENT...`` runs ``python ARGUMENT...``.

This process must be the leader of a process group. It ends the group when the server exits or is killed, when the
parent exits or is killed, and at SIGTERM. vLLM itself leaves processes behind when its API server is killed, and can
ignore SIGTERM while it starts. The exit code is that of the server; a signal that killed the server also kills this
process.

It may run in a virtual environment without envkit, so it imports nothing of envkit.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_SIGNALS = (signal.SIGTERM, signal.SIGCHLD)
_SERVER_S = 10.0
"""Seconds for the server to exit in order after SIGTERM."""
_GROUP_S = 5.0
"""Seconds for its other processes to exit after SIGTERM, and for its resource tracker after the others' SIGKILL."""
_TRACKER = b"multiprocessing.resource_tracker"
"""In the command line of the process that removes the shared memory of the others when they have exited."""


class Supervisor:
    """Starts the server. All its descendants become children of this process when their parents exit."""

    def __init__(self, arguments: list[str]) -> None:
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        self._server = subprocess.Popen([sys.executable, *arguments], preexec_fn=_prepare_server)
        self._status = 0
        self._has_exited = False

    def run(self) -> int:
        """Wait until the server exits or SIGTERM arrives, end all processes, and return the server's wait status."""
        while not self._has_exited and signal.sigwait(_SIGNALS) != signal.SIGTERM:
            self._reap()
        if not self._has_exited:
            self._server.send_signal(signal.SIGTERM)
            self._wait(_SERVER_S)
        os.killpg(0, signal.SIGTERM)  # blocked in this process
        os.killpg(0, signal.SIGCONT)
        if not self._wait(_GROUP_S):
            end_s = time.monotonic() + _GROUP_S
            while time.monotonic() < end_s and not self._wait(0.2):  # the children of a killed child become ours
                _kill([pid for pid in _children() if not _is_tracker(pid)])
            _kill(_children())
            self._wait(_GROUP_S)
        return self._status

    def _wait(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` seconds until there is no child; return whether that is so."""
        end_s = time.monotonic() + timeout_s
        while self._reap():
            if (left_s := end_s - time.monotonic()) <= 0:
                return False
            signal.sigtimedwait({signal.SIGCHLD}, left_s)
        return True

    def _reap(self) -> bool:
        """Wait for all children that have exited; return whether there are others."""
        with suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == self._server.pid:
                    self._status, self._has_exited = status, True
                    self._server.returncode = status  # so that Popen does not wait for it
                if pid == 0:
                    return True
        return False


def main(parent_pid: int, arguments: list[str]) -> None:
    """Run the server, and exit as it did. Do nothing if the parent has exited already."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent_pid:
        sys.exit("the parent process has exited")
    status = Supervisor(arguments).run()
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
        os.kill(os.getpid(), number)
    sys.exit(os.waitstatus_to_exitcode(status))


def _prepare_server() -> None:
    """Set up the child between fork and exec. This is safe, because this process has one thread."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


def _children() -> list[int]:
    return [int(word) for word in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


def _is_tracker(pid: int) -> bool:
    with suppress(OSError):
        return _TRACKER in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def _kill(pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        sys.exit(f"prctl {option}: {os.strerror(ctypes.get_errno())}")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
