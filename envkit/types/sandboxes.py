"""Data types of sandboxes: specs, states, causes of their end, events of a pool, and results of commands."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Literal, NamedTuple, TypeAlias

from envkit.types.plain import TenantKey

_HOST = re.compile(r"[a-z0-9_]([a-z0-9_.-]{0,251}[a-z0-9_])?")

SandboxUser: TypeAlias = Literal["agent", "grader", "root"]
"""User that runs a program in a sandbox: agent (uid 1000) and grader (uid 1001), which have no capabilities, or root,
which has root rights only inside the sandbox."""
GRADER_HOME = "/run/envkit-grader"
"""The private folder of the user ``grader``, in a sandbox with isolation."""

EXEC_TIMEOUT_S = 60.0
"""Default timeout of a command in seconds."""

FileUser: TypeAlias = Literal["agent", "grader"]
"""User inside the sandbox whose permissions apply when a file is read or written, and who owns the written files."""


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """Spec of a sandbox: what runs in it, its limits, its network and its lifetime.

    A limit of None means the default (1,024 MiB of memory, 256 processes, 256 MiB per writable folder, all CPUs) if
    the machine can enforce it, and no limit otherwise. If you set a limit that cannot be enforced, the start fails.

    Attributes:
        command: Program and arguments, run by the user ``agent`` from the start. The sandbox ends with the program,
            which creates its sockets in the folder ``$ENVKIT_SOCKETS``. Empty for a sandbox that only serves calls.
        image: Image with the sandbox's files; None for the backend's default.
        env: Environment variables of all programs in the sandbox. The host's variables are not inherited.
        cpus: CPU limit, such as 0.5.
        memory_mib: Memory limit of all programs in the sandbox together, in MiB.
        pids: Limit on processes and threads.
        disk_mib: Disk limit of each writable folder, in MiB.
        network: ``"none"``, ``"open"``, or an allowlist of host names that programs reach through a proxy.
        profile: ``"strict"``, or ``"system"`` for programs that need root rights and a writable root file system.
        views: Read-only mounts of host files and folders: pairs of an absolute host path and the path in the sandbox,
            such as ``(("/srv/levels", "/data"),)``. Not supported by remote sandboxes.
        runtime: Docker runtime, such as ``"runsc"``; None for Docker's default.
        untrusted: Whether the code inside may be hostile. If so, backends without isolation refuse the spec.
        ttl_s: Seconds from its start until the sandbox ends itself, with or without clients; None for no limit.
        detached: Whether the sandbox outlives the process that started it.
        orphan_ttl_s: Seconds without a connected client after which a detached sandbox ends itself; None for no limit.
        start_timeout_s: Seconds after which a start that is not complete fails.
        ledger: Id of the ledger (the server's database of leases) that records a detached sandbox. A later server with
            the same ledger may end the sandbox. Empty if no ledger records it.
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


class SandboxLimits(NamedTuple):
    """The limits of a sandbox after defaults have replaced the limits that its spec leaves out. Sizes are in MiB.

    `disk_mib` is the limit of each writable folder. `cpus=None` means no limit.
    """

    memory_mib: int
    pids: int
    disk_mib: int
    cpus: float | None

    @classmethod
    def of(cls, spec: SandboxSpec) -> SandboxLimits:
        memory_mib = 1024 if spec.memory_mib is None else spec.memory_mib
        default_mib = 4096 if spec.profile == "system" else min(256, max(memory_mib // 4, 1))
        disk_mib = default_mib if spec.disk_mib is None else spec.disk_mib
        return cls(memory_mib, 256 if spec.pids is None else spec.pids, disk_mib, spec.cpus)


def is_host(text: str) -> bool:
    """Return whether `text` can be a lower-case host name or an IPv4 address."""
    return _HOST.fullmatch(text) is not None


def why_no_network(network: str | tuple[str, ...]) -> str | None:
    """Return why this value of `SandboxSpec.network` is invalid, in one line; None if it is valid."""
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
    """The sandbox is warm: it answers and has no lease."""
    LEASED = "leased"
    """The sandbox has a lease."""
    SUSPECT = "suspect"
    """The sandbox has missed heartbeats, but may still recover."""
    LOST = "lost"
    """The sandbox was healthy and ended unexpectedly."""
    STOPPED = "stopped"
    """The sandbox was stopped, or never became healthy."""


class CauseKind(StrEnum):
    """Kind of reason why a sandbox ended or failed to start."""

    EXITED = "exited"
    """The sandbox's command or its process 1 exited."""
    KILLED = "killed"
    """A signal or an operator killed the sandbox or its command."""
    OUT_OF_MEMORY = "out_of_memory"
    DISK_FULL = "disk_full"
    """The sandbox exceeded its disk limit, or the host's disk is nearly full."""
    UNRESPONSIVE = "unresponsive"
    """The sandbox did not answer in time; it may hang or be paused."""
    PROTOCOL_ERROR = "protocol_error"
    """envkit's own process inside the sandbox sent or received an invalid message."""
    STOPPED = "stopped"
    """The user or an operator stopped the sandbox."""
    EXPIRED = "expired"
    """The sandbox reached its time to live."""
    ORPHANED = "orphaned"
    """No client was connected to the sandbox for longer than its limit."""
    NODE_LOST = "node_lost"
    """The sandbox's node (the machine that it runs on) is gone or unreachable."""
    BACKEND_LOST = "backend_lost"
    """The daemon or server that runs the sandbox does not answer, or does not know the sandbox."""
    IMAGE_UNUSABLE = "image_unusable"
    """The image lacks Python."""
    START_FAILED = "start_failed"
    """The sandbox did not become ready, for a reason that no other kind describes."""
    UNKNOWN = "unknown"


class Blocked(StrEnum):
    """Why a sandbox does not answer, as far as its host can see."""

    UNKNOWN = ""
    PAUSED = "paused"
    """A signal, or the Docker daemon, has stopped it."""
    PROCESS_LIMIT = "its programs fill its limit of processes"
    """At least three quarters of the limit are used. This counts as caused by the agent; a slow host may add to it."""


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a sandbox ended or failed to start. ``str(cause)`` is `detail`.

    Attributes:
        kind: The kind of reason, for programs.
        detail: One-line description, for people.
        by_agent: Whether the code in the sandbox ended the sandbox: it exceeded the memory or disk limit, or the
            command exited. False if uncertain, for example after a signal, because signals may come from outside.
    """

    kind: CauseKind
    detail: str
    by_agent: bool = False

    def __str__(self) -> str:
        return self.detail

    def followed_by(self, text: str) -> Cause:
        """Return a copy of the cause with ``"; "`` and `text` appended to its detail."""
        return replace(self, detail=f"{self.detail}; {text}")


class Phase(NamedTuple):
    """One entry of a sandbox's history: the state that it entered, when (in seconds since 1970), and why.

    In the entry of the sandbox's end, `cause` is set and `reason` is the detail of the cause.
    """

    state: SandboxState
    at_s: float
    reason: str
    cause: Cause | None = None


@dataclass(frozen=True, slots=True)
class SandboxView:
    """State of a sandbox in a pool, at the time of the call that returned the view.

    Attributes:
        id: Id of the sandbox in the pool.
        backend_id: Id that the backend gave to the sandbox; empty until it has started.
        node: Name of the machine of the pool that runs it; empty until the pool has chosen one.
        tenant: Name of its tenant; empty if it has no tenant.
        spec: Its spec.
        phases: Its history, oldest first; the last phase is the current one.
        expires_at_s: When its lease expires if it is not used until then, in seconds since 1970; None for never.
    """

    id: str
    backend_id: str
    node: str
    tenant: str
    spec: SandboxSpec
    phases: tuple[Phase, ...]
    expires_at_s: float | None = None

    @property
    def key(self) -> TenantKey:
        return TenantKey(self.tenant, self.id)

    @property
    def state(self) -> SandboxState:
        return self.phases[-1].state


@dataclass(frozen=True, slots=True)
class PoolEvent:
    """An event of a pool: a sandbox changed its state, or an alert for operators.

    Attributes:
        number: Number of the event, counted from 1 without gaps since the server's process started.
        at_s: Time in seconds since 1970.
        kind: ``"state"`` for a change of state; otherwise the kind of alert, such as ``"memory"``.
        sandbox_id: Id of the sandbox; empty if the event is not about a single sandbox.
        tenant: Name of the sandbox's tenant; empty if there is no sandbox or tenant.
        text: One-line message: the reason of the change, or the value that caused the alert and its limit.
        state: The new state of the sandbox, if `kind` is ``"state"``; otherwise None.
        cause: Why the sandbox ended, if the event reports its end; otherwise None.
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
        exit_code: Exit code of the command; the negative signal number if a signal ended it; None after a timeout.
        stdout_bytes: Raw standard output; only its end if `truncated_bytes` is positive.
        stderr_bytes: Raw standard error; only its end if `truncated_bytes` is positive.
        timed_out: Whether the command was stopped because it exceeded its timeout.
        truncated_bytes: Number of bytes dropped from the beginnings of the two outputs, in total.
        duration_s: Duration of the command in seconds.
        is_shell_lost: Whether the shell that ran the command ended, so that its variables and working directory are
            lost. The next command starts a new shell.
        is_out_of_memory: Whether the kernel killed one of the command's processes for lack of memory.
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
        """The standard output as text, with invalid bytes replaced."""
        return self.stdout_bytes.decode(errors="replace")

    @property
    def stderr(self) -> str:
        """The standard error as text, with invalid bytes replaced."""
        return self.stderr_bytes.decode(errors="replace")
