"""Paths, users and the configuration of process 1 in an isolated sandbox, which are the same for every backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from envkit.types import GRADER_HOME, JSON, SandboxSpec

WORK = "/workspace"
SOCKETS = "/run/envkit"
"""Directory in which programs in the sandbox create the sockets that the host can connect to."""
CONTROL_DIR = "/run/envkit-control"
"""Directory that only root can access. Contains the socket through which clients reconnect to a detached sandbox."""
CONTROL_SOCKET = "s"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
AGENT_UID = 1000
GRADER_UID = 1001
MAX_GRADER_HOME_MIB = 64


def max_inodes(size_mib: int) -> int:
    """Return the inode limit of a tmpfs with `size_mib` MiB: one inode per 4 KiB, and at least 16,384."""
    return max(size_mib << 8, 1 << 14)


def config(
    spec: SandboxSpec,
    env: Mapping[str, str],
    command: Sequence[str],
    *,
    has_users: bool,
    is_root: bool = True,
    work: str = WORK,
    grader_home: str = GRADER_HOME,
) -> dict[str, JSON]:
    """Return the configuration that process 1 of a sandbox receives as its first message.

    `has_users` tells whether the users ``agent`` and ``grader`` have different uids, so that only graders can enter
    `grader_home`, and `is_root` whether programs may run as root. An empty `command` runs none.
    """
    return {
        "agent_uid": AGENT_UID if has_users else None,
        "grader_uid": GRADER_UID if has_users else None,
        "grader_home": grader_home,
        "root": is_root,
        "env": {**env},
        "work": work,
        "command": list(command) or None,
        "ttl_s": spec.ttl_s,
        "detached": spec.detached,
        "orphan_ttl_s": spec.orphan_ttl_s,
        "control_socket": f"{CONTROL_DIR}/{CONTROL_SOCKET}" if spec.detached else None,
    }


SHARED_PER_UID = ("inotify instances", "queued signals and timers", "pipe memory", "POSIX message queues")
"""Resources that the kernel limits per user of the host. Sandboxes that run as the same host user share the limit."""
