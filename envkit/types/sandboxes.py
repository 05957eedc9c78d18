"""Data types of sandboxes: specs, states, causes, events and results of commands."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Literal, NamedTuple, TypeAlias

from envkit.types.plain import JSON

_HOST = re.compile(r"[a-z0-9_]([a-z0-9_.-]{0,251}[a-z0-9_])?")

SandboxUser: TypeAlias = Literal["agent", "grader", "root"]
"""User of a program in a sandbox: agent (uid 1000) and grader (uid 1001) have no capabilities; root is the sandbox's
root."""
GRADER_HOME = "/run/envkit-grader"
"""The grader's private folder in a sandbox with isolation."""

EXEC_TIMEOUT_S = 60.0
"""Default timeout of a command in seconds."""

FileUser: TypeAlias = Literal["agent", "grader"]
"""User whose permissions apply to file transfers, and who owns the written files."""


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """Spec of a sandbox.

    A limit of None means the backend's default (1,024 MiB of memory, 256 processes, 256 MiB per writable place, all
    CPUs) if this machine can enforce it, and no limit otherwise. An explicit limit that cannot be enforced is refused.

    Attributes:
        command: Program that runs in it as the agent; the sandbox ends with it. The folder for its sockets is
            ``$ENVKIT_SOCKETS``. Empty for a sandbox that only serves `Sandbox.exec`.
        image: Image with its files; None for the backend's default.
        env: Environment variables of all its programs; none are inherited from the host.
        cpus: CPU limit, such as 0.5.
        memory_mib: Memory limit of all its programs together, MiB.
        pids: Limit on processes and threads.
        disk_mib: Disk limit, MiB for each writable place.
        network: ``"none"``; ``"open"``; or an allowlist of host names, reached through a proxy.
        profile: ``"strict"``, or ``"system"`` for tasks that need root and a writable root file system.
        views: Read-only mounts of host files and folders, as absolute host path and path inside, such as
            ``(("/srv/levels", "/data"),)``. Not for remote sandboxes.
        runtime: Docker runtime, such as ``"runsc"``; None for Docker's default.
        untrusted: Whether the code inside may be hostile; refused if the backend cannot contain it.
        ttl_s: Seconds after which it ends itself, even without its server; None for never.
        detached: Whether it outlives the process that started it.
        orphan_ttl_s: Seconds without a connection after which a detached sandbox ends itself; None for never.
        start_timeout_s: Timeout of its start in seconds.
        ledger: Id of the ledger that records a detached sandbox; the next owner of that ledger may end it. Empty for
            none.
    """

    command: tuple[str, ...] = ()
    image: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    cpus: float | None = None
    memory_mib: int | None = None
    pids: int | None = None
    disk_mib: int | None = None
    network: str | tuple[str, ...] = "none"
    profile: Literal["strict", "system"] = "strict"
    views: tuple[tuple[str, str], ...] = ()
    runtime: str | None = None
    untrusted: bool = False
    ttl_s: float | None = None
    detached: bool = False
    orphan_ttl_s: float | None = None
    start_timeout_s: float = 30.0
    ledger: str = ""


def is_host(text: str) -> bool:
    """Return whether `text` can be a lower-case host name or an IPv4 address."""
    return _HOST.fullmatch(text) is not None


def why_no_network(network: str | tuple[str, ...]) -> str | None:
    """Return in one line why this value of `SandboxSpec.network` is invalid; None if it is valid."""
    if isinstance(network, str):
        known = network in ("none", "open")
        return None if known else f"network={network!r} is invalid: use 'none', 'open' or a tuple of hosts"
    for host in network:
        if not is_host(host.lower().removeprefix("*.")):
            return f"{host[:100]!r} is not a host name, such as example.org, or a pattern, such as *.example.org"
    return None


class SandboxState(StrEnum):
    """State of a sandbox."""

    STARTING = "starting"
    READY = "ready"
    """Warm: it answers and has no lease."""
    LEASED = "leased"
    """It has a lease."""
    SUSPECT = "suspect"
    """It has missed its heartbeat."""
    LOST = "lost"
    """It was healthy and ended unexpectedly."""
    STOPPED = "stopped"
    """It was stopped, or never became healthy."""


class CauseKind(StrEnum):
    """Kind of cause of a sandbox's end or failed start."""

    EXITED = "exited"
    """Process 1 exited with a code: its own, or that of the sandbox's command."""
    KILLED = "killed"
    """A signal or an operator killed it or its command."""
    OUT_OF_MEMORY = "out_of_memory"
    DISK_FULL = "disk_full"
    """It exceeded its disk limit, or the host's disk is nearly full."""
    UNRESPONSIVE = "unresponsive"
    """It did not answer in time; it may hang or be paused."""
    PROTOCOL_ERROR = "protocol_error"
    """Its agent sent or received an invalid message."""
    STOPPED = "stopped"
    """Its user or an operator stopped it."""
    EXPIRED = "expired"
    """Its time to live passed."""
    ORPHANED = "orphaned"
    """It had no connection for too long."""
    NODE_LOST = "node_lost"
    """Its node is gone or unreachable."""
    BACKEND_LOST = "backend_lost"
    """The daemon or server that runs it does not know it or does not answer."""
    IMAGE_UNUSABLE = "image_unusable"
    """Its image lacks Python."""
    START_FAILED = "start_failed"
    """It did not become ready, for any other reason."""
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Cause:
    """Cause of a sandbox's end or failed start. `str` returns the line for people.

    Attributes:
        kind: The kind, for programs.
        detail: One line for people.
        by_agent: Whether the code in the sandbox ended it: it hit its own limit (memory, disk), or its command
            exited. False if uncertain, as for every signal, which may come from outside.
    """

    kind: CauseKind
    detail: str
    by_agent: bool = False

    def __str__(self) -> str:
        return self.detail

    @classmethod
    def of(cls, plain: Mapping[str, object]) -> Cause:
        """Return the cause from its JSON form.

        Raises:
            KeyError, ValueError: `plain` is not a cause.
        """
        return cls(CauseKind(str(plain["kind"])), str(plain["detail"]), plain.get("by_agent") is True)

    def plain(self) -> dict[str, JSON]:
        """Return the JSON form."""
        return {"kind": self.kind.value, "detail": self.detail, "by_agent": self.by_agent}

    def followed_by(self, text: str) -> Cause:
        """Return the cause with `text` appended to its detail."""
        return replace(self, detail=f"{self.detail}; {text}")


class Phase(NamedTuple):
    """One entry of a sandbox's history: a state, its start (seconds since 1970, UTC), and the reason.

    `cause` is set if the sandbox has ended; `reason` is then its detail.
    """

    state: SandboxState
    at_s: float
    reason: str
    cause: Cause | None = None


@dataclass(frozen=True, slots=True)
class SandboxView:
    """Snapshot of a pool's record of a sandbox.

    Attributes:
        id: Its id in the pool.
        backend_id: Its id at the backend; empty until it has started.
        node: Name of its node; empty until it is placed.
        tenant: The tenant that holds it; empty for none.
        spec: Its spec.
        phases: Its history, oldest first; the last phase is the current one.
        expires_at_s: When its lease expires unless it is used, in seconds since 1970; None for never.
    """

    id: str
    backend_id: str
    node: str
    tenant: str
    spec: SandboxSpec
    phases: tuple[Phase, ...]
    expires_at_s: float | None = None

    @property
    def state(self) -> SandboxState:
        return self.phases[-1].state


@dataclass(frozen=True, slots=True)
class PoolEvent:
    """An event of a pool.

    Attributes:
        number: Counts from 1 without gaps during the life of the process.
        at_s: Time in seconds since 1970.
        kind: ``"state"`` for a change of state; otherwise the kind of alert, such as ``"memory"``.
        sandbox_id: Id of the sandbox; empty if the event is not about a single one.
        tenant: The tenant that holds it; empty for none.
        text: One line for people: the reason, or the value and its limit.
        state: The new state, if `kind` is ``"state"``.
        cause: The cause, if the sandbox ended.
    """

    number: int
    at_s: float
    kind: str
    sandbox_id: str
    tenant: str
    text: str
    state: SandboxState | None = None
    cause: Cause | None = None


@dataclass(frozen=True, slots=True)
class ExecResult:
    """Result of a command.

    Attributes:
        exit_code: Its exit code, negative for a signal; None after a timeout.
        stdout_bytes: Its raw output; only the end if `truncated_bytes` is positive.
        stderr_bytes: The same for stderr.
        timed_out: Whether it was stopped by the timeout.
        truncated_bytes: Number of bytes dropped from the front of both outputs together.
        duration_s: Duration in seconds.
        is_shell_lost: Whether its shell was lost with its variables and working directory; the next command starts a
            new one.
        is_out_of_memory: Whether one of its processes was killed for lack of memory.
    """

    exit_code: int | None
    stdout_bytes: bytes = b""
    stderr_bytes: bytes = b""
    timed_out: bool = False
    truncated_bytes: int = 0
    duration_s: float = 0.0
    is_shell_lost: bool = False
    is_out_of_memory: bool = False

    @property
    def stdout(self) -> str:
        """Its output as text, with invalid bytes replaced."""
        return self.stdout_bytes.decode(errors="replace")

    @property
    def stderr(self) -> str:
        """Its stderr as text, with invalid bytes replaced."""
        return self.stderr_bytes.decode(errors="replace")
