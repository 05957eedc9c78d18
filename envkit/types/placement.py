"""Machines on which processes can be started, and places on them."""

from __future__ import annotations

from dataclasses import dataclass

THIS_NODE = "n0"
"""Name of the node of the process that asks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A machine, or one of several nodes of a cluster on a machine.

    Attributes:
        name: ``"n0"`` for the node of this process, then ``"n1"`` and so on.
        id: Name or id by which the cluster knows it.
        host: Name for people.
        address: IP address at which servers on it are reached from this process.
        gpus: Ids of its GPUs, as CUDA_VISIBLE_DEVICES has them.
        cpus: Number of processor cores.
    """

    name: str
    id: str
    host: str
    address: str
    gpus: tuple[str, ...] = ()
    cpus: int = 1


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process runs.

    Attributes:
        node: Name of the node.
        gpus: Indexes of its GPUs in `Node.gpus`; None leaves CUDA_VISIBLE_DEVICES unchanged.
        cpus: Processor cores for the process alone, where the cluster can reserve them; None: it shares those of the
            node.
    """

    node: str = THIS_NODE
    gpus: tuple[int, ...] | None = None
    cpus: int | None = None

    def __str__(self) -> str:
        return f"{self.node}:{','.join(map(str, self.gpus))}" if self.gpus else self.node
