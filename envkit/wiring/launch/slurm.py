"""The launcher for the nodes of an allocation of Slurm: one job step for each process, by srun."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Mapping, Sequence

import anyio

from envkit import clock
from envkit.errors import UsageError
from envkit.types import Node, Place

from .local import RelayLauncher

_START_S = 60
_REPEATED = re.compile(r"(\d+)(?:\(x(\d+)\))?")


async def open_slurm() -> RelayLauncher:
    """Return the launcher for the allocation in which this process runs.

    Raises:
        UsageError: It does not run in one, or a node has no address.
    """
    variables = os.environ
    if not variables.get("SLURM_JOB_ID") or not variables.get("SLURMD_NODENAME"):
        raise UsageError("placement.launcher: slurm needs an allocation; run this in a script for sbatch")
    words = ["scontrol", "show", "hostnames", variables.get("SLURM_JOB_NODELIST", "")]
    try:
        done = await anyio.run_process(words, check=False)
    except OSError as error:
        raise UsageError(f"placement.launcher: cannot run scontrol: {error.strerror}") from None
    if done.returncode:
        raise UsageError(f"placement.launcher: scontrol: {done.stderr.decode(errors='replace').strip()}")
    others = await clock.to_thread(other_nodes, variables, done.stdout.decode().split(), socket.gethostbyname)
    return RelayLauncher(others, relay)


def other_nodes(variables: Mapping[str, str], hosts: Sequence[str], resolve: Callable[[str], str]) -> list[Node]:
    """Return the nodes of an allocation but this one. Slurm tells only the GPUs of this one, so all have as many.

    `resolve` returns the IP address of a host, or raises OSError.

    Raises:
        UsageError: A node has no address.
    """
    cpus = [
        int(count)
        for count, times in _REPEATED.findall(variables.get("SLURM_JOB_CPUS_PER_NODE", ""))
        for _ in range(int(times or 1))
    ]
    gpus = tuple(str(number) for number in range(int(variables.get("SLURM_GPUS_ON_NODE") or 0)))
    nodes: list[Node] = []
    for index, host in enumerate(hosts):
        if host == variables["SLURMD_NODENAME"]:
            continue
        try:
            address = resolve(host)
        except OSError as error:
            raise UsageError(f"placement.launcher: the node {host} has no IP address: {error.strerror}") from None
        count = cpus[index] if index < len(cpus) else 1
        nodes.append(Node(name=f"n{len(nodes) + 1}", id=host, host=host, address=address, gpus=gpus, cpus=count))
    return nodes


def relay(
    argv: Sequence[str], env: Mapping[str, str], place: Place, node: Node
) -> tuple[Sequence[str], Mapping[str, str]]:
    """Return the relay of a program on `node`; see `local.Relay`. SIGTERM ends the step.

    If srun itself gets SIGKILL, the step goes on until its allocation ends.
    """
    words = ["srun", "--nodes=1", "--ntasks=1", f"--nodelist={node.id}"]
    words += ["--exact", f"--cpus-per-task={place.cpus}"] if place.cpus else ["--overlap"]
    words += [f"--gpus-per-node={len(place.gpus)}"] if place.gpus else []
    # Steps share the memory of the allocation, and a step that cannot start ends instead of waiting for ever.
    words += ["--mem=0", f"--immediate={_START_S}", "--unbuffered", "--input=none", "--kill-on-bad-exit=1"]
    return [*words, *argv], env
