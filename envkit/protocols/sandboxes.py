"""Protocols of sandboxes, backends and pools."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol

from anyio import Event

from envkit.restarts import Replacement
from envkit.types import EXEC_TIMEOUT_S, JSON, Cause, ExecResult, FileUser, SandboxSpec, SandboxUser, SandboxView


class Shell(Protocol):
    """A persistent shell in a sandbox: working directory, variables and functions remain for the next command."""

    async def run(
        self, command: str, *, timeout_s: float = EXEC_TIMEOUT_S, max_output_bytes: int = 1 << 20
    ) -> ExecResult:
        """Run `command` to its end and return its result. Background jobs that it started keep running.

        Concurrent calls run one after the other, in order. The command's stdin is empty. The command is stopped after
        `timeout_s` seconds. Only the last `max_output_bytes` of each output are returned.

        Raises:
            SandboxLostError: The sandbox was lost.
        """
        ...

    async def close(self) -> None:
        """End the shell and all its processes; idempotent."""
        ...


class Program(Protocol):
    """A running program in a sandbox, with streamed input and output."""

    async def receive(self) -> tuple[str, bytes] | None:
        """Wait for output; return the stream (``"out"`` or ``"err"``) and the bytes. After all output, return None.

        Raises:
            SandboxLostError: The sandbox was lost.
        """
        ...

    async def send(self, content: bytes) -> None:
        """Send input to the program; wait while the program does not read its input."""
        ...

    async def send_eof(self) -> None:
        """Close the program's input; if the program has a terminal, send Ctrl-D instead."""
        ...

    async def resize(self, rows: int, columns: int) -> None:
        """Resize the terminal of the program."""
        ...

    async def result(self) -> ExecResult:
        """Return the program's result without its output. Call this only after `receive` has returned None."""
        ...


class Sandbox(Protocol):
    """A running sandbox, in which to run programs and read and write files. String paths are paths inside it.

    Raises:
        SandboxLostError: From every call: the sandbox was lost.
        UnsupportedError: From a call with `user`: this sandbox has no such user.
    """

    @property
    def id(self) -> str: ...

    @property
    def grader_home(self) -> str:
        """Path of the private folder of the user ``grader``, also its ``HOME``. Kept in memory; holds at most 64 MiB.

        The folder is not private if grader and agent have the same uid: on backends that do not enforce ``uid`` (see
        `SandboxBackend.capabilities`), and in the profile ``"system"``, where all programs run as root.
        """
        ...

    async def exec(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float = EXEC_TIMEOUT_S,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdin: bytes = b"",
        user: SandboxUser = "agent",
        max_output_bytes: int = 1 << 20,
    ) -> ExecResult:
        """Run a program to its end. If the program fails or times out, the result reports it, and nothing is raised.

        When the program ends, all processes that it started are killed. If it cannot be started, the exit code is 127
        (not found) or 126 (any other reason).

        Args:
            argv: Program and arguments.
            timeout_s: Seconds after which the program is killed, by default 60.
            env: Environment variables in addition to those of the spec.
            cwd: Working directory. None means the workspace for the agent and `grader_home` for the grader. Do not run
                a grader in the workspace: Python, for example, loads code from its working directory.
            stdin: Content of the program's standard input.
            user: User that runs the program. A grader can read the agent's files. The agent cannot read the files that
                a grader writes (umask 077), unless the grader changes their mode.
            max_output_bytes: Only this number of bytes is returned of stdout and of stderr, from the end.
        """
        ...

    def program(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: SandboxUser = "agent",
        terminal: tuple[int, int] | None = None,
    ) -> AbstractAsyncContextManager[Program]:
        """Run a program with streamed input and output; kill it if it still runs at the end of the block.

        Args:
            argv: Program and arguments.
            timeout_s: Seconds until the program is killed.
            env: Environment variables in addition to those of the spec.
            cwd: Working directory; None means the same default as for `exec`.
            user: The user that the program runs as.
            terminal: Rows and columns of the program's terminal; None for pipes.

        Raises:
            UnsupportedError: This sandbox cannot open terminals.
        """
        ...

    def shell(self, name: str = "main", *, user: SandboxUser = "agent") -> Shell:
        """Return the shell `name`. The shell starts when its first command runs, in the default `cwd` of `exec`."""
        ...

    async def read(self, path: str, *, max_bytes: int = 64 << 20, user: FileUser = "agent") -> bytes:
        """Read a file with the permissions of `user`.

        Raises:
            MissingFileError: The file does not exist or cannot be read.
            TooLargeError: The file is larger than `max_bytes`.
        """
        ...

    async def write(self, path: str, content: bytes, *, mode: int | None = None, user: FileUser = "agent") -> None:
        """Write a file atomically, and create missing folders.

        The agent's programs can replace a grader's files, or the folders above them, anywhere outside `grader_home`.

        Args:
            path: Path of the file.
            content: Content of the file.
            mode: Mode of the file; None means 0600 for the user ``grader`` and 0644 for the agent.
            user: User whose permissions apply, and who owns the file and the created folders.

        Raises:
            RefusedFileError: The file cannot be written.
        """
        ...

    async def upload(self, source: Path, target: str, *, user: FileUser = "agent") -> None:
        """Copy the file or folder `source` of the host into the sandbox, as `target`.

        `user` owns all copied files. The agent cannot read those of the grader. Raises the same errors as `write`.
        """
        ...

    async def download(self, source: str, target: Path, *, max_bytes: int = 1 << 30, user: FileUser = "agent") -> None:
        """Copy a file or folder from the sandbox to the host.

        Files that vanish during the copy, and files and folders that `user` cannot read, are skipped.

        Args:
            source: Path in the sandbox.
            target: Path of the copy on the host, where nothing must exist yet.
            max_bytes: Maximum total size of the copied files.
            user: User whose permissions apply to the files in the sandbox.

        Raises:
            MissingFileError: `source` does not exist or cannot be read.
            TooLargeError: The files are larger than `max_bytes`.
            RefusedFileError: `source` is or contains a device, a link that leads outside of it, or an absolute name.
        """
        ...

    async def connect(self, address: str | int) -> socket.socket:
        """Return a connected, non-blocking socket to a server in the sandbox. The caller closes it.

        `address` is the name of a socket in ``$ENVKIT_SOCKETS``, or a TCP port.

        Raises:
            UnreachableError: No server listens at `address`.
        """
        ...

    async def probe(self, timeout_s: float) -> float:
        """Return the round-trip time to the sandbox in seconds.

        Raises:
            DeadlineError: The sandbox did not answer within `timeout_s` seconds.
        """
        ...

    async def snapshot(self) -> str:
        """Store a copy of the sandbox's files, and return the copy's name, which `SandboxBackend.restore` accepts.

        Files that vanish during the copy, or that the user ``agent`` cannot read, are skipped.

        Raises:
            UnsupportedError: This sandbox does not support snapshots.
        """
        ...

    async def log(self) -> str:
        """Return the last 64 KiB that the sandbox's command wrote to standard error."""
        ...

    async def stats(self) -> Mapping[str, JSON]:
        """Return the resource use of the sandbox: ``processes``, ``uptime_s``, and if known the following.

        ``memory_bytes``; ``disk_place``, the path of the fullest writable file system; and ``disk_percent``, how full
        this file system is.
        """
        ...

    async def wait(self) -> Cause:
        """Wait until the sandbox ends, and return the cause of its end."""
        ...

    async def stop(self) -> None:
        """Stop all programs in the sandbox and remove its files; idempotent."""
        ...


class SandboxBackend(Protocol):
    """Starts sandboxes of one kind, such as containers. Use it as ``async with``; the end of the block stops them.

    A backend whose sandboxes run an image with Python and envkit has the attribute ``in_image = True``. Sandboxes of
    other backends can read this machine's Python and import path. A backend has ``distinguishes_memory_limit = True``
    if its out-of-memory causes have `by_agent` set exactly if the sandbox reached its own memory limit.
    """

    async def start(self, spec: SandboxSpec) -> Sandbox:
        """Start a sandbox, and wait until the sandbox answers and its command runs.

        Raises:
            SandboxRefusedError: The backend cannot provide what `spec` asks for.
            SandboxEndedError: The command ended immediately, or the limits of `spec` are too small to start.
            SandboxStartError: The sandbox did not start for another reason.
        """
        ...

    async def restore(self, snapshot: str, spec: SandboxSpec) -> Sandbox:
        """Start a sandbox with the files of `snapshot`, a name that `Sandbox.snapshot` returned.

        Raises:
            SandboxRefusedError: As for `start`, or there is no such snapshot.
            SandboxEndedError: As for `start`, or the snapshot's files exceed the limits of `spec`.
            SandboxStartError: As for `start`.
        """
        ...

    async def snapshot_bytes(self, snapshot: str) -> int:
        """Return the size of `snapshot` on disk in bytes; 0 if it does not exist."""
        ...

    async def remove_snapshot(self, snapshot: str) -> None:
        """Remove `snapshot`; idempotent. Sandboxes restored from it keep their files."""
        ...

    def capabilities(self) -> Mapping[str, bool]:
        """Return by name whether this machine enforces each protection and limit.

        The names are ``isolation``, ``network``, ``memory``, ``pids``, ``cpu``, ``disk``, ``uid`` and ``seccomp``.
        """
        ...


class SandboxPool(Protocol):
    """Starts sandboxes and leases them to callers.

    Calls to a leased sandbox never hang: they raise `SandboxLostError` when the sandbox ends or becomes unresponsive. A
    sandbox can start with the files of a snapshot, whose name `Sandbox.snapshot` returned for a sandbox of this pool.
    """

    def lease(
        self, spec: SandboxSpec, *, tenant: str = "", wait_s: float = 60.0, snapshot: str | None = None
    ) -> AbstractAsyncContextManager[Sandbox]:
        """Lease a sandbox for the duration of the block, and stop it afterwards. Warm sandboxes are preferred.

        Raises:
            ImpossibleSandboxError: `spec` is too large for every node, even an empty one. Raised without waiting.
            CapacityError: No node had room within `wait_s` seconds.
            SandboxRefusedError: No node can provide what `spec` asks for, or there is no such snapshot.
            SandboxEndedError: The command ended immediately, or the limits of `spec` are too small to start.
            SandboxStartError: The sandbox did not start for another reason.
        """
        ...

    async def create(
        self,
        id: str,
        spec: SandboxSpec,
        *,
        tenant: str = "",
        ttl_s: float | None = None,
        snapshot: str | None = None,
        wait_s: float | None = None,
    ) -> SandboxView:
        """Lease a sandbox under the id `id` until it is stopped, or was not used for `ttl_s` seconds.

        If the id is in use, the call returns the view of the existing sandbox, even if that sandbox has ended by
        itself. After a call of `stop`, or if the start failed, the id is free again. The call waits up to `wait_s`
        seconds for room on a node. With None, it waits only if the pool stops warm sandboxes to make room.

        Raises:
            SandboxConflictError: The id belongs to a sandbox with another spec or snapshot.
            ImpossibleSandboxError, CapacityError, SandboxStartError: As for `lease`.
            LeaseNotPersistedError: The lease could not be written to the ledger.
        """
        ...

    async def snapshot_bytes(self, snapshot: str) -> int:
        """Return the size of a snapshot on disk in bytes; 0 if it does not exist."""
        ...

    async def remove_snapshot(self, snapshot: str) -> None:
        """Remove a snapshot; idempotent."""
        ...

    def get(self, id: str, *, tenant: str = "") -> Sandbox:
        """Return a leased sandbox by its id. Each use of the sandbox renews its lease.

        Args:
            id: Id of the sandbox.
            tenant: Tenant that owns the sandbox. Two tenants may use the same id.

        Raises:
            SandboxNotFoundError: There is no such sandbox.
            SandboxLostError: The sandbox has ended; the error has the cause.
        """
        ...

    def view(self, id: str, *, tenant: str = "") -> SandboxView:
        """Return the state of a sandbox without renewing its lease. Ended sandboxes can be viewed for a while.

        Raises:
            SandboxNotFoundError: There is no such sandbox.
        """
        ...

    def views(self, *, tenant: str | None = None) -> Sequence[SandboxView]:
        """Return the views of the sandboxes of `tenant` (None means all tenants), oldest first."""
        ...

    async def stop(self, id: str, *, tenant: str = "") -> None:
        """Stop a sandbox and wait until it is fully removed; idempotent. An unknown id is no error."""
        ...


class ServerPool(SandboxPool, Protocol):
    """A sandbox pool in this process that also monitors servers in sandboxes, and limits what its user restarts."""

    def watch(self, id: str, check: Callable[[float], Awaitable[None]], on_end: Callable[[Cause], None]) -> None:
        """Add a check, for example of the server in a leased sandbox, to each probe of the sandbox.

        Args:
            id: Id of a sandbox that has no tenant.
            check: Returns when the server has answered. It is called with the number of seconds without an answer after
                which the sandbox is lost.
            on_end: Called with the cause as soon as the sandbox ends for any reason.

        Raises:
            SandboxLostError: The sandbox has ended.
        """
        ...

    def lose(self, id: str, cause: Cause) -> None:
        """Declare a sandbox without a tenant lost, because its user has found out that it is."""
        ...

    def failed(self, subject: Hashable, name: str, cause: object, *, excuse: Event | None = None) -> Replacement:
        """Record that something failed which its user restarts; return when the restart budget allows the restart.

        If the budget of `subject` is spent, emit an alert of the kind ``"restarts"`` that begins with `name`.

        Args:
            subject: What failed. Each subject has its own budget.
            name: What failed, for people.
            cause: Why it failed.
            excuse: If it is set later, the failure no longer counts against the budget.
        """
        ...

    def alert(self, kind: str, text: str) -> None:
        """Emit an alert that is not about a single sandbox, unless one of this kind was emitted in the last minute."""
        ...
