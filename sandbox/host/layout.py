"""What boxes that isolate have alike inside, whatever their backend: places, users, what their agent is told first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from envkit.types import GRADER_HOME, JSON, SandboxSpec

WORK = "/workspace"
SOCKETS = "/run/envkit"
"""Where a box finds its folder for sockets."""
DOOR = "/run/envkit-door"
"""Where, for its root alone, the socket lies by which a box that stays is reached again."""
DOOR_SOCKET = "s"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
AGENT_UID = 1000
GRADER_UID = 1001


def most_inodes(size_mib: int) -> int:
    """Return how many files, folders and links a place in memory of this size may hold: one for each 4 KiB of it, and
    at least 16,384.
    """
    return max(size_mib << 8, 1 << 14)


def config(
    spec: SandboxSpec, env: Mapping[str, str], command: Sequence[str], *, has_users: bool, is_root: bool = True
) -> dict[str, JSON]:
    """Return what the agent of a box is told first.

    Args:
        spec: What the box is to be.
        env: The environment of everything in it.
        command: What it runs.
        has_users: Whether the agent's programs and the grader's are users of their own.
        is_root: Whether something may run there as root.
    """
    return {
        "agent_uid": AGENT_UID if has_users else None,
        "grader_uid": GRADER_UID if has_users else None,
        "grader_home": GRADER_HOME,
        "root": is_root,
        "env": {**env},
        "work": WORK,
        "command": list(command) or None,
        "ttl_s": spec.ttl_s,
        "detached": spec.detached,
        "orphan_ttl_s": spec.orphan_ttl_s,
        "door": f"{DOOR}/{DOOR_SOCKET}" if spec.detached else None,
    }


COUNTED = ("inotify instances", "queued signals and timers", "pipe memory", "POSIX message queues")
"""What the kernel counts for each user, so that sandboxes without uids of their own share it."""
