"""Starts the processes of a run, such as vLLM servers and sandbox nodes: on this machine, or on the nodes of a cluster.

A launcher implements `envkit.protocols.Launcher`.
"""

from __future__ import annotations

from typing import Literal

from envkit.protocols import Launcher

from .local import LocalLauncher


async def open_launcher(kind: Literal["local", "ray", "slurm"]) -> Launcher:
    """Return the launcher that ``placement.launcher`` names, which knows its nodes.

    Raises:
        UsageError: There is no such cluster, or it does not answer.
    """
    if kind == "ray":
        from .ray import open_ray

        return await open_ray()
    if kind == "slurm":
        from .slurm import open_slurm

        return await open_slurm()
    return LocalLauncher()
