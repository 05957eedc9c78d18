"""Peak memory of a process and of its descendants, such as vLLM's servers."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

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


def name_of(pid: int) -> str:
    """Return what a process is: ``envkit train``, a process of vLLM, or the name of its program."""
    words = (_PROC / str(pid) / "cmdline").read_text().rstrip("\0 ").split("\0")
    if words[0].startswith("VLLM::"):
        return f"vLLM {words[0].removeprefix('VLLM::').split()[0]}"
    if "vllm.entrypoints.openai.api_server" in words:
        return "vLLM APIServer"
    if "envkit" in words:
        return f"envkit {words[words.index('envkit') + 1]}"
    return Path(words[0]).name


def port_of(pid: int) -> str:
    """Return the value of the argument ``--port`` of a process; empty if it has no such argument."""
    try:
        words = (_PROC / str(pid) / "cmdline").read_text().split("\0")
    except OSError:
        return ""
    return words[words.index("--port") + 1] if "--port" in words else ""


def memory_mib(pid: int, key: str) -> int:
    """Return the value of `key` in a process's status in MiB: ``VmRSS``, or ``VmHWM`` for its peak."""
    for line in (_PROC / str(pid) / "status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return round(int(line.split()[1]) / 1024)
    raise ValueError(f"process {pid} has no {key}")
