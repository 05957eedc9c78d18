"""Removal of the folders, control groups and containers that ended envkit processes have left on this machine."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from envkit import clock
from envkit.sandbox.bubblewrap import orphans as bubblewrap_orphans
from envkit.sandbox.docker import backend as docker
from envkit.sandbox.docker import orphans as docker_orphans
from envkit.sandbox.docker.api import Daemon
from envkit.sandbox.host import cgroups, run_dirs


async def prune(*, dry_run: bool, warn: Callable[[str], None]) -> Sequence[str]:
    """Remove processes, control groups, folders and containers of sandboxes whose envkit process has ended.

    Detached sandboxes are not removed. Returns one line per removed object.

    Args:
        dry_run: Whether to remove nothing, and only return what would be removed.
        warn: Called with one line about each backend that is skipped.
    """
    done = await clock.to_thread(_prune_here, dry_run)
    if (why := await docker.why_unavailable()) is None:
        daemon = await Daemon.connect()
        try:
            found = await docker_orphans.gone(daemon) if dry_run else await docker_orphans.reap(daemon)
        finally:
            await daemon.close()
        done += [f"{kind} {id}" for kind, id in found]
    else:
        warn(f"docker was left out: {why}")
    return done


def _prune_here(dry_run: bool) -> list[str]:
    done = []
    if sys.platform == "linux":
        for group in cgroups.gone(cgroups.find()):
            done.append(f"control group {group.name}")
            if not dry_run:
                group.kill()
                group.remove()
        done += [f"process {pid}" for pid in (bubblewrap_orphans.find() if dry_run else bubblewrap_orphans.reap())]
    return done + [f"folder {folder}" for folder in (run_dirs.gone() if dry_run else run_dirs.reap())]
