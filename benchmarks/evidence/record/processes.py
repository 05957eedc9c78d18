"""The descendants of a process, such as vLLM's servers: their peak memory, and whether any is left behind."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from envkit import clock

_SUBREAPER = 36
"""The constant PR_SET_CHILD_SUBREAPER of prctl."""
_LEFT_S = 10
_EVERY_S = 0.5
_PROC = Path("/proc")


@contextmanager
def peaks(of: int | None = None) -> Iterator[dict[str, int]]:
    """Yield the peaks of resident memory in MiB by process name, of the descendants of process `of` during the block.

    The peak of several processes with the same name is that of the largest one. The default process is this one, which
    is listed as ``itself``. A process is read twice a second, so what it allocates in its last half second is missing.
    """
    found: dict[str, int] = {}
    is_over = threading.Event()
    root = os.getpid() if of is None else of

    def watch() -> None:
        while not is_over.wait(_EVERY_S):
            for pid in descendants(root):
                with suppress(OSError, ValueError, IndexError):
                    name = "itself" if pid == root else name_of(pid)
                    found[name] = max(found.get(name, 0), memory_mib(pid, "VmHWM"))

    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(watch)
        try:
            yield found
        finally:
            is_over.set()
        watching.result()


def descendants(root: int) -> list[int]:
    """Return `root` and all processes below it."""
    children: dict[int, list[int]] = {}
    for entry in _PROC.iterdir():
        if entry.name.isdecimal():
            with suppress(OSError, IndexError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found


def adopt_orphans() -> None:
    """Adopt descendants whose parent process has ended."""
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)


def left_behind() -> list[str]:
    """Wait up to 10 s until all descendants of this process have ended; return the commands of those that still run."""
    until = clock.stopwatch() + _LEFT_S
    while left := _running():
        if clock.stopwatch() > until:
            return left
        threading.Event().wait(0.05)
    return []


def _running() -> list[str]:
    """Reap adopted processes that have ended, and return the commands of all running descendants."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return []
    return [words for pid in descendants(os.getpid())[1:] if (words := " ".join(words_of(pid)).strip())]


def words_of(pid: int) -> list[str]:
    """Return the command of a process; no words if it has ended."""
    try:
        return (_PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").rstrip("\0 ").split("\0")
    except OSError:
        return []


def name_of(pid: int) -> str:
    """Return what a process is: ``envkit train``, a process of vLLM, or the name of its program."""
    words = words_of(pid) or [""]
    if words[0].startswith("VLLM::"):
        return f"vLLM {words[0].removeprefix('VLLM::').split()[0]}"
    if "vllm.entrypoints.openai.api_server" in words:
        return "vLLM APIServer"
    if "envkit" in words:
        return f"envkit {words[words.index('envkit') + 1]}"
    return Path(words[0]).name


def port_of(pid: int) -> str:
    """Return the value of the argument ``--port`` of a process; empty if it has no such argument."""
    words = words_of(pid)
    return words[words.index("--port") + 1] if "--port" in words else ""


def memory_mib(pid: int, key: str) -> int:
    """Return the value of `key` in a process's status in MiB: ``VmRSS``, or ``VmHWM`` for its peak."""
    for line in (_PROC / str(pid) / "status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return round(int(line.split()[1]) / 1024)
    raise ValueError(f"process {pid} has no {key}")
