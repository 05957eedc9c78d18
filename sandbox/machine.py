"""Default capacity of this machine for sandboxes, derived from its memory and process limits.

Each sandbox reserves its limits, not its current use, so that memory and processes suffice even if all sandboxes reach
their limits. The capacity is only a share of the machine; the rest is left to the server and other processes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from .pool.node import Capacity, Node, ResourceRequest

MEMORY_SHARE = 0.75
PIDS_SHARE = 0.5
ENVS_SHARE = 0.5
"""Default share of a node's capacity for the sandboxes that serve environments."""

_PIDS = (Path("/proc/sys/kernel/pid_max"), Path("/proc/sys/kernel/threads-max"))


def this_machine(groups: Path = Path("/sys/fs/cgroup"), own_group: Path = Path("/proc/self/cgroup")) -> Capacity:
    """Return how much memory and how many processes this process and its children may use; None for an unknown limit.
    These are the resources of the machine, or the limits of this process's control group if they are lower.

    Args:
        groups: Mount point of the control groups.
        own_group: The file that names this process's control group.
    """
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    memory = min([physical, *_numbers(_limits(groups, own_group, "memory", ("memory.max", "memory.limit_in_bytes")))])
    pids = min(_numbers([*_PIDS, *_limits(groups, own_group, "pids", ("pids.max",))]), default=None)
    return Capacity(memory_mib=memory >> 20, pids=pids)


def with_defaults(limits: Capacity, machine: Capacity) -> Capacity:
    """Return `limits`. If it does not set memory or processes, set them to a share of those of `machine`."""
    memory_mib, pids = limits.memory_mib, limits.pids
    if memory_mib is None and machine.memory_mib is not None:
        memory_mib = int(machine.memory_mib * MEMORY_SHARE)
    if pids is None and machine.pids is not None:
        pids = int(machine.pids * PIDS_SHARE)
    return replace(limits, memory_mib=memory_mib, pids=pids)


def describe(limits: Capacity) -> str:
    """Return the capacity as text, such as ``256 sandboxes, 18,000 MiB of memory``."""
    resources = (
        (limits.sandboxes, "{:,} sandboxes"),
        (limits.memory_mib, "{:,} MiB of memory"),
        (limits.disk_mib, "{:,} MiB of disk"),
        (limits.pids, "{:,} processes"),
        (limits.cpus, "{:g} processors"),
    )
    return ", ".join(words.format(number) for number, words in resources if number is not None)


def env_sandbox_count(node: Node, request: ResourceRequest, processors: int) -> int:
    """Return the default number of sandboxes that serve environments, each with the resources `request`.

    The default is one sandbox per processor, but no more than fit into half of the node, which is empty.
    """
    return max(int(min(processors, node.room(request) * ENVS_SHARE)), 1)


def _limits(groups: Path, own_group: Path, controller: str, names: Iterable[str]) -> Iterator[Path]:
    """Yield the limit files of this process's control group and its ancestors, of cgroup version 1 or 2."""
    try:
        lines = [line.split(":", 2) for line in own_group.read_text().splitlines()]
    except OSError:
        return
    for number, controllers, path in lines:
        if number == "0" or controller in controllers.split(","):
            tree = groups if number == "0" else groups / controller
            group = tree / path.lstrip("/")
            for folder in (group, *group.parents):
                yield from (folder / name for name in names)
                if folder == tree:
                    break


def _numbers(files: Iterable[Path]) -> Iterator[int]:
    """Yield the number in each file; skip files that do not exist or contain no number."""
    for file in files:
        try:
            yield int(file.read_text())
        except (OSError, ValueError):
            continue
