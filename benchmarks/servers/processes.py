"""CPU time and memory of processes, from ``/proc``."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@contextmanager
def busy_processors() -> Iterator[None]:
    """Keep all processors busy during the block."""
    spinning = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(len(os.sched_getaffinity(0)))
    ]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def family(pids: Iterable[int]) -> list[int]:
    """Return the pids of processes and all their descendants."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    for pid, words in _all():
        children[int(words[1])].append(pid)
    found = list(pids)
    for pid in found:
        found += children[pid]
    return found


def cpu_s(pid: int, *, descendants: bool = True) -> float:
    """Return the CPU seconds that a process has used so far, by default together with its descendants."""
    ticks = {each: int(words[11]) + int(words[12]) for each, words in _all()}
    return sum(ticks.get(each, 0) for each in (family([pid]) if descendants else [pid])) / _TICKS_PER_S


def idle_s() -> float:
    """Return the seconds that all processors together have been idle so far."""
    words = Path("/proc/stat").read_text().split(maxsplit=6)
    return (int(words[4]) + int(words[5])) / _TICKS_PER_S  # waiting for a disk counts as idle


def pss_mib(pids: Iterable[int]) -> float:
    """Return the memory of processes in MiB. Shared memory counts proportionally (PSS)."""
    kib = 0
    for pid in pids:
        with suppress(OSError):  # the process has just ended
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            kib += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return kib / 1024


def available_mib() -> float:
    """Return the memory that is available on the machine, in MiB."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")) / 1024


def _all() -> Iterator[tuple[int, list[str]]]:
    """Yield the pid of each process and the fields of its ``stat`` after the name, from the state on."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # the process has just ended
            yield int(path.parent.name), path.read_text().rpartition(")")[2].split()
