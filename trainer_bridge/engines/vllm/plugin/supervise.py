"""Runs a vLLM server and ends all its processes: ``supervise.py PARENT-PID ARGUMENT...`` runs ``python ARGUMENT...``.

This process must be the leader of a session. It ends the processes of the session when the server exits or is killed,
when the parent exits or is killed, and at SIGTERM. vLLM itself leaves processes behind when its API server is killed,
and can ignore SIGTERM while it starts. The exit code is that of the server; a signal that killed the server also kills
this process.

It may run in a virtual environment without envkit, so it imports nothing but the module beside it, by PYTHONPATH.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from envkit_processes import end_group, wait_gone

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_SIGNALS = (signal.SIGTERM, signal.SIGCHLD)
_SERVER_S = 10.0
"""Seconds for the server to exit in order after SIGTERM."""
_GROUP_S = 5.0
"""Seconds for its other processes to exit after SIGTERM."""


def run(arguments: list[str]) -> int:
    """Run the server until it exits or SIGTERM arrives, end all processes, and return the server's `returncode`."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # the zombies of a killed server become children of this process
    server = subprocess.Popen([sys.executable, *arguments], preexec_fn=_prepare_server)
    while server.poll() is None and signal.sigwait(_SIGNALS) != signal.SIGTERM:
        pass
    if server.poll() is None:
        server.terminate()
        wait_gone(os.getpid(), _SERVER_S)
    end_group(os.getpid(), term_s=_GROUP_S)
    returncode = server.poll() or 0
    _kill_children()
    return returncode


def main(parent_pid: int, arguments: list[str]) -> None:
    """Run the server, and exit as it did. Do nothing if the parent has exited already."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent_pid:
        sys.exit("the parent process has exited")
    returncode = run(arguments)
    if returncode < 0:
        if (number := -returncode) != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
        os.kill(os.getpid(), number)
    sys.exit(returncode)


def _kill_children() -> None:
    """Kill the processes that have left the session; when one ends, its children become children of this process."""
    end_s = time.monotonic() + _GROUP_S
    with suppress(ChildProcessError):
        while time.monotonic() < end_s:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
                os.kill(int(pid), signal.SIGKILL)  # a child that was not waited for, so its pid is not reused
            time.sleep(0.1)


def _prepare_server() -> None:
    """Set up the child between fork and exec. This is safe, because this process has one thread."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        sys.exit(f"prctl {option}: {os.strerror(ctypes.get_errno())}")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
