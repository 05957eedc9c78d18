"""Runs Python with the given arguments, and ends it with its parent: ``die_with_parent.py PARENT-PID ARGUMENT...``.

The kernel sends SIGTERM to this process when the thread that started it ends. The program itself replaces this process,
and may run in a virtual environment without envkit, so this module imports nothing of envkit.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(parent_pid: int, arguments: list[str]) -> None:
    """Replace this process with ``python ARGUMENTS``. Exit if the parent has ended before the signal was set."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0):
        sys.exit(f"cannot set the parent-death signal: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent_pid:
        sys.exit("the parent process has ended")
    os.execv(sys.executable, [sys.executable, *arguments])


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
