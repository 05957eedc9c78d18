"""Paths, users and the agent's configuration inside an isolated sandbox; the same for every backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from envkit.types import GRADER_HOME, JSON, SandboxSpec

WORK = "/workspace"
SOCKETS = "/run/envkit"
"""Directory of the sandbox's sockets."""
CONTROL_DIR = "/run/envkit-control"
"""Directory, accessible only to root, of the control socket for new connections to a detached sandbox."""
CONTROL_SOCKET = "s"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
AGENT_UID = 1000
GRADER_UID = 1001
MAX_GRADER_HOME_MIB = 64


def max_inodes(size_mib: int) -> int:
    """Return the inode limit of a tmpfs of `size_mib` MiB: one inode per 4 KiB, and at least 16,384."""
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
    """Return the configuration that a sandbox's agent receives as its first message.

    Args:
        spec: Spec of the sandbox.
        env: Environment variables of every program in the sandbox.
        command: Command that the sandbox runs from its start; empty for none.
        has_users: Whether the agent's programs and graders run as different users.
        is_root: Whether programs may run as root in the sandbox.
        work: Working directory of the agent's programs.
        grader_home: Folder that only graders can enter, if they have a user of their own.
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
"""Resources that the kernel limits per host user; sandboxes that run as the same host user share them."""
