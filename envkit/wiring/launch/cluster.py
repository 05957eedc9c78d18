"""The choice of a launcher."""

from __future__ import annotations

from typing import Literal, TypeAlias

from envkit.protocols import Launcher

from .local import LocalLauncher

LauncherKind: TypeAlias = Literal["local", "ray", "slurm"]


async def open_launcher(kind: LauncherKind) -> Launcher:
    """Return the launcher of this kind, which knows its nodes.

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
