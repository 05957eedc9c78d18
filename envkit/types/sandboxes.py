"""What is said of sandboxes: what one is to be, how it is, and what a program in it did."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Literal, NamedTuple, TypeAlias

from envkit.types.plain import JSON

_HOST = re.compile(r"[a-z0-9_]([a-z0-9_.-]{0,251}[a-z0-9_])?")

SandboxUser: TypeAlias = Literal["agent", "grader", "root"]
"""Who runs a program in a sandbox: uid 1000 without any capability, uid 1001 likewise, or the root of the box."""
GRADER_HOME = "/run/envkit-grader"
"""Where a sandbox that isolates has the folder that only a grader can enter."""

EXEC_TIMEOUT_S = 60.0
"""Seconds after which a command is stopped whose caller gives no timeout."""

FileUser: TypeAlias = Literal["agent", "grader"]
"""Whose rights hold when files are written to a sandbox or read from it, and whom they belong to then."""


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """What a sandbox is to be.

    A bound that is None is the backend's own (1,024 MiB of memory, 256 processes, 256 MiB in each writable place, all
    processors) where this machine can hold it, and none where it cannot; a bound that is given and cannot be held is
    refused.

    Attributes:
        command: Program that runs in it, as the agent's user; when it ends the box does. Its sockets' folder is in
            ``$ENVKIT_SOCKETS``. Empty for a box that only waits for `Sandbox.exec`.
        image: Image whose files it sees; None takes the backend's default.
        env: Environment variables of everything in it; nothing is inherited from the host.
        cpus: Bound on processors, such as 0.5.
        memory_mib: Bound on the memory of all that runs in it, MiB.
        pids: Bound on the number of processes and threads.
        disk_mib: Bound on what may be written, MiB for each writable place.
        network: ``"none"``; ``"open"``; or the names of the hosts that can be reached, all by way of a proxy of ours.
        profile: ``"strict"``, or ``"system"`` for tasks that need root and a writable root file system.
        views: Files and folders of the host, by absolute path, and where programs see them, read-only, such as
            ``(("/srv/levels", "/data"),)``. Not for remote sandboxes.
        runtime: Docker's runtime, such as ``"runsc"``; None takes its default.
        untrusted: Whether what runs inside may be hostile; refused where the backend cannot hold it.
        ttl_s: Seconds after which it ends itself, whatever becomes of us; None for never.
        detached: Whether it outlives the process that started it.
        orphan_ttl_s: Seconds without anybody connected to it after which a box that stays ends itself; None for never.
        start_timeout_s: Seconds until a box that is not ready counts as failed.
        ledger: Id of the ledger in which a box that stays is written down; who opens that next may end it. Empty for
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
    """Say whether a text can be the name of a host, or an address of IPv4; capitals are none."""
    return _HOST.fullmatch(text) is not None


def why_no_network(network: str | tuple[str, ...]) -> str | None:
    """Return why `SandboxSpec.network` cannot be this, in one line; None where it can."""
    if isinstance(network, str):
        known = network in ("none", "open")
        return None if known else f"network={network!r} is refused: it is 'none', 'open' or a tuple of hosts"
    for host in network:
        if not is_host(host.lower().removeprefix("*.")):
            return (
                f"{host[:100]!r} is no name of a host, such as example.org, nor of all below one, such as *.example.org"
            )
    return None


class SandboxState(StrEnum):
    """Where a sandbox is in its life."""

    STARTING = "starting"
    READY = "ready"
    """It answers, and waits to be lent."""
    LEASED = "leased"
    """Somebody has it."""
    SUSPECT = "suspect"
    """Somebody has it, and it has been silent for longer than it should."""
    LOST = "lost"
    """It was healthy and is gone."""
    STOPPED = "stopped"
    """It was ended, or never became healthy."""


class CauseKind(StrEnum):
    """What ended a sandbox, or kept it from starting."""

    EXITED = "exited"
    """Process 1 exited with a code: with that of the sandbox's command, or by itself."""
    KILLED = "killed"
    """A signal or an operator ended it, or the signal of its command did."""
    OUT_OF_MEMORY = "out_of_memory"
    DISK_FULL = "disk_full"
    """It wrote more than it may, or the host's disk is nearly full."""
    UNRESPONSIVE = "unresponsive"
    """It did not answer in time; it may hang, or be paused."""
    PROTOCOL_ERROR = "protocol_error"
    """Its agent sent what the protocol does not allow, or received that."""
    STOPPED = "stopped"
    """Its user, or whoever runs the server, stopped it."""
    EXPIRED = "expired"
    """Its time to live is over."""
    ORPHANED = "orphaned"
    """Nobody was connected to it for too long."""
    NODE_LOST = "node_lost"
    """Its node is gone, or cannot be reached."""
    BACKEND_LOST = "backend_lost"
    """The daemon that runs it, or the server that lends it, does not know it or does not answer."""
    IMAGE_UNUSABLE = "image_unusable"
    """Its image lacks Python."""
    START_FAILED = "start_failed"
    """It did not become ready, for any other reason."""
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a sandbox ended, or did not start. `str` gives the line for people.

    Attributes:
        kind: What programs decide by.
        detail: One line for people.
        by_agent: Whether what runs in the sandbox ended it: it hit the sandbox's own limit (memory, disk), or its
            command exited. False where that is not certain, so for every kill by a signal: it may come from outside.
    """

    kind: CauseKind
    detail: str
    by_agent: bool = False

    def __str__(self) -> str:
        return self.detail

    @classmethod
    def of(cls, plain: Mapping[str, object]) -> Cause:
        """Return the cause that `plain` gave.

        Raises:
            KeyError, ValueError: It is none.
        """
        return cls(CauseKind(str(plain["kind"])), str(plain["detail"]), plain.get("by_agent") is True)

    def plain(self) -> dict[str, JSON]:
        """Return it as JSON."""
        return {"kind": self.kind.value, "detail": self.detail, "by_agent": self.by_agent}

    def followed_by(self, text: str) -> Cause:
        """Return the cause with more to its line."""
        return replace(self, detail=f"{self.detail}; {text}")


class Phase(NamedTuple):
    """One entry of a sandbox's history: since when it is in a state (seconds since 1970, UTC), and why.

    `cause` is set where the sandbox is over; `reason` is its line then.
    """

    state: SandboxState
    at_s: float
    reason: str
    cause: Cause | None = None


@dataclass(frozen=True, slots=True)
class SandboxView:
    """A sandbox of a pool, from outside.

    Attributes:
        id: The name by which it is asked for.
        backend_id: What its backend calls it; empty until it has been started.
        node: Name of the node that it is on; empty until it has been placed.
        tenant: Who holds it; empty for nobody.
        spec: What it is.
        phases: Its history, oldest first; the last one is now.
        expires_at_s: When its lease ends unless it is used, in seconds since 1970; None for never.
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
    """Something that happened in a fleet.

    Attributes:
        number: Counts from 1, without gaps, as long as the process lives.
        at_s: When, in seconds since 1970.
        kind: ``"state"`` for another state of a sandbox; otherwise what is to be looked at, such as ``"memory"``.
        sandbox_id: Which sandbox; empty where it is about no single one.
        tenant: Whose it is; empty for nobody's.
        text: One line for people: the reason, or the figure and its bound.
        state: The sandbox's new state, where `kind` is ``"state"``.
        cause: Why the sandbox is over, where that is its new state.
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
    """What a command did.

    Attributes:
        exit_code: Its exit code, negative for a signal; None when it was stopped because of the timeout.
        stdout_bytes: What it wrote, byte for byte; the end of it where `truncated_bytes` says that some was dropped.
        stderr_bytes: The same for standard error.
        timed_out: Whether it was stopped because of the timeout.
        truncated_bytes: Number of bytes that were dropped in front, of both outputs together.
        duration_s: Seconds it ran.
        is_shell_lost: Whether the shell that it ran in is gone with its variables and folder, so that the next command
            begins in a new one.
        is_out_of_memory: Whether something in it was killed because memory ran out.
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
        """What it wrote, undecodable bytes replaced."""
        return self.stdout_bytes.decode(errors="replace")

    @property
    def stderr(self) -> str:
        """The same for standard error."""
        return self.stderr_bytes.decode(errors="replace")
