"""How many sandboxes a machine survives, where nobody says: what they may use together follows from what is there.

Bounds are counted and not what is used, so that a machine goes on when every sandbox takes all that it may. A share is
left to the server and to whatever else runs.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from envkit.sandbox.pool.node import Capacity, Node, ResourceRequest

MEMORY_SHARE = 0.75
PIDS_SHARE = 0.5
BODIES_SHARE = 1 / 16
"""Of the memory, for the bodies of requests and answers: they are held up to three times over while they are read and
passed on.
"""
ENVS_SHARE = 0.5
"""Of what a node holds, for the boxes that serve environments, where their number is not said."""

_LEAST_BODIES_MIB = 64
_PIDS = (Path("/proc/sys/kernel/pid_max"), Path("/proc/sys/kernel/threads-max"))


@dataclass(frozen=True, slots=True)
class MachineCapacity:
    """What there is for all programs together; None is not known.

    Attributes:
        memory_mib: MiB of memory.
        pids: Processes and threads.
    """

    memory_mib: int | None
    pids: int | None


def this_machine(groups: Path = Path("/sys/fs/cgroup"), own_group: Path = Path("/proc/self/cgroup")) -> MachineCapacity:
    """Return what this process and its children may use: what the machine has, or a control group allows.

    Args:
        groups: Where control groups are mounted.
        own_group: The file that names our own group.
    """
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    memory = min([physical, *_numbers(_limits(groups, own_group, "memory", ("memory.max", "memory.limit_in_bytes")))])
    pids = min(_numbers([*_PIDS, *_limits(groups, own_group, "pids", ("pids.max",))]), default=None)
    return MachineCapacity(memory >> 20, pids)


def filled_in(holds: Capacity, machine: MachineCapacity) -> Capacity:
    """Return `holds` with the memory and the processes that it leaves open as a share of what `machine` has."""
    memory_mib, pids = holds.memory_mib, holds.pids
    if memory_mib is None and machine.memory_mib is not None:
        memory_mib = int(machine.memory_mib * MEMORY_SHARE)
    if pids is None and machine.pids is not None:
        pids = int(machine.pids * PIDS_SHARE)
    return replace(holds, memory_mib=memory_mib, pids=pids)


def bodies_mib(machine: MachineCapacity) -> int:
    """Return the MiB of bodies that a server may hold at once, where nobody says."""
    return (
        _LEAST_BODIES_MIB
        if machine.memory_mib is None
        else max(int(machine.memory_mib * BODIES_SHARE), _LEAST_BODIES_MIB)
    )


def described(holds: Capacity) -> str:
    """Say in words what sandboxes may use together."""
    named = (
        (holds.boxes, "{:,} sandboxes"),
        (holds.memory_mib, "{:,} MiB of memory"),
        (holds.disk_mib, "{:,} MiB of disk"),
        (holds.pids, "{:,} processes"),
        (holds.cpus, "{:g} processors"),
    )
    return ", ".join(words.format(number) for number, words in named if number is not None)


def env_boxes(node: Node, box: ResourceRequest, processors: int) -> int:
    """Return how many boxes serve environments where nobody says: one for each processor, in half of what `node` holds.

    Args:
        node: It is empty.
        box: What one of them takes.
        processors: Number of processors.
    """
    return max(int(min(processors, node.room(box) * ENVS_SHARE)), 1)


def _limits(groups: Path, own_group: Path, controller: str, names: Iterable[str]) -> Iterator[Path]:
    """The files that say what control groups allow: ours, and those around it, of either version."""
    try:
        lines = [line.split(":", 2) for line in own_group.read_text().splitlines()]
    except OSError:
        return
    for number, controllers, path in lines:
        if number == "0" or controller in controllers.split(","):
            tree = groups if number == "0" else groups / controller
            group = tree / path.lstrip("/")
            for place in (group, *group.parents):
                yield from (place / name for name in names)
                if place == tree:
                    break


def _numbers(files: Iterable[Path]) -> Iterator[int]:
    """What files say, of those that are there and say a number."""
    for file in files:
        try:
            yield int(file.read_text())
        except (OSError, ValueError):
            continue
