"""Protocols of sandboxes, backends and pools."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol, runtime_checkable

from envkit.types import (
    EXEC_TIMEOUT_S,
    Cause,
    ExecResult,
    FileUser,
    PoolEvent,
    SandboxSpec,
    SandboxUser,
    SandboxView,
)


class Shell(Protocol):
    """A persistent shell: working directory, variables and functions carry over to the next command."""

    async def run(
        self, command: str, *, timeout_s: float = EXEC_TIMEOUT_S, max_output_bytes: int = 1 << 20
    ) -> ExecResult:
        """Run `command` to its end and return its result. Background jobs that it started keep running.

        Calls on one shell run one after the other, in order. Stdin is empty. A command is stopped after `timeout_s`
        seconds.

        Raises:
            SandboxLostError: The sandbox was lost.
        """
        ...

    async def close(self) -> None:
        """End the shell and all its processes; idempotent."""
        ...


class Program(Protocol):
    """A running program with streamed input and output."""

    async def receive(self) -> tuple[str, bytes] | None:
        """Wait for output; return its stream (``"out"`` or ``"err"``) and its content, or None at the end of output.

        Raises:
            SandboxLostError: The sandbox was lost.
        """
        ...

    async def send(self, content: bytes) -> None:
        """Send input; wait while the program does not read."""
        ...

    async def send_eof(self) -> None:
        """Send the end of input; if the program has a terminal, send Ctrl-D instead."""
        ...

    async def resize(self, rows: int, columns: int) -> None:
        """Resize the terminal of the program."""
        ...

    async def result(self) -> ExecResult:
        """Return the exit code and the other results, but no output. Call it only after `receive` has returned None."""
        ...


@runtime_checkable
class InteractiveSandbox(Protocol):
    """A sandbox that runs programs with streamed input and output."""

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
        """Run a program during the block; leaving the block ends it.

        Args:
            argv: Program and arguments.
            timeout_s: Seconds until the program is killed.
            env: Environment variables in addition to those of the spec.
            cwd: Working directory; None for the same default as `Sandbox.exec`.
            user: The user that the program runs as.
            terminal: Rows and columns of the program's terminal; None for pipes.

        Raises:
            SandboxLostError: The sandbox was lost.
            UnsupportedError: This sandbox has no such user, or cannot open terminals.
        """
        ...


class Sandbox(Protocol):
    """A sandbox for programs. File paths are paths inside the sandbox."""

    @property
    def id(self) -> str: ...

    @property
    def grader_home(self) -> str:
        """Path of the grader's private folder, which is also its ``HOME``. The folder is in memory and at most 64 MiB.

        The folder is not private if grader and agent run as the same user. This is so if the backend lacks ``uid``
        in `SandboxBackend.capabilities`, and in the profile ``"system"``, where all programs run as root.
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
        """Run a program to its end. Failures and timeouts are reported in the result and raise no error.

        All processes that the program started end with it. If a program cannot be started, its exit code
        is 127 (not found) or 126 (any other reason).

        Args:
            argv: Program and arguments.
            timeout_s: Timeout in seconds, by default 60.
            env: Environment variables in addition to those of the spec.
            cwd: Working directory; None is the workspace for the agent and `grader_home` for the grader. The
                grader must not start in the workspace, because Python and others load code from there.
            stdin: Its standard input.
            user: User that runs the program. A grader can read the agent's files. The agent cannot read a grader's
                files unless the grader changes their mode (umask 077).
            max_output_bytes: Bytes kept from the end of each output.

        Raises:
            SandboxLostError: The sandbox was lost.
            UnsupportedError: This sandbox has no such user.
        """
        ...

    def shell(self, name: str = "main", *, user: SandboxUser = "agent") -> Shell:
        """Return the shell `name`. It starts with its first command, in the default working directory of `exec`."""
        ...

    async def read(self, path: str, *, max_bytes: int = 64 << 20, user: FileUser = "agent") -> bytes:
        """Read a file with the permissions of `user`.

        Raises:
            MissingFileError: The file does not exist or cannot be read.
            TooLargeError: The file is larger than `max_bytes`.
            SandboxLostError: The sandbox was lost.
            UnsupportedError: This sandbox has no such user.
        """
        ...

    async def write(self, path: str, content: bytes, *, mode: int | None = None, user: FileUser = "agent") -> None:
        """Write a file atomically; missing folders are created.

        A grader's files, and the folders above them, are safe from the agent's programs only below `grader_home`.

        Args:
            path: Path of the file.
            content: Its content.
            mode: Its mode; None for 0644, or 0600 for a grader.
            user: User whose permissions apply, and who owns the file and the created folders.

        Raises:
            RefusedFileError: The file cannot be written.
            SandboxLostError: The sandbox was lost.
            UnsupportedError: This sandbox has no such user.
        """
        ...

    async def upload(self, source: Path, target: str, *, user: FileUser = "agent") -> None:
        """Copy a file or folder from the host into the sandbox, as `target`.

        `user` owns all copied files. The agent cannot read files of the grader. Raises the same errors as `write`.
        """
        ...

    async def download(self, source: str, target: Path, *, max_bytes: int = 1 << 30, user: FileUser = "agent") -> None:
        """Copy a file or folder from the sandbox to the host, as `target`, which must not exist.

        Links that lead outside of `source`, devices and absolute names are refused. Files that vanish during the copy
        and files and folders that `user` cannot read are skipped.

        Args:
            source: Path in the sandbox.
            target: Path on the host.
            max_bytes: Maximum total size.
            user: User that reads the files.

        Raises:
            MissingFileError: The file does not exist or cannot be read.
            TooLargeError: It is larger than `max_bytes`.
            RefusedFileError: `source` is or contains something that must not be copied.
            SandboxLostError: The sandbox was lost.
            UnsupportedError: This sandbox has no such user.
        """
        ...

    async def connect(self, address: str | int) -> socket.socket:
        """Return a connected, non-blocking socket to a server in the sandbox. The caller closes it.

        `address` is the name of a socket in ``$ENVKIT_SOCKETS``, or a TCP port.

        Raises:
            SandboxLostError: The sandbox was lost.
            UnreachableError: Nothing listens there.
        """
        ...

    async def probe(self, timeout_s: float) -> float:
        """Return the round-trip time to the sandbox in seconds.

        Raises:
            DeadlineError: No answer within `timeout_s`.
            SandboxLostError: The sandbox was lost.
        """
        ...

    async def snapshot(self) -> str:
        """Snapshot the files, and return the snapshot's name for `SandboxBackend.restore`.

        Files that vanish during the snapshot, or that the agent's user cannot read, are skipped.

        Raises:
            UnsupportedError: This sandbox does not support snapshots.
        """
        ...

    async def wait(self) -> Cause:
        """Wait until the sandbox ends, and return the cause of its end."""
        ...

    async def stop(self) -> None:
        """Stop all programs in the sandbox and remove its files; idempotent."""
        ...


class SandboxBackend(Protocol):
    """Starts sandboxes of one kind. Used as ``async with``; leaving the block stops its sandboxes."""

    async def start(self, spec: SandboxSpec) -> Sandbox:
        """Start a sandbox, and wait until the sandbox answers and its command runs.

        Raises:
            SandboxRefusedError: The backend cannot grant `spec`.
            SandboxEndedError: Its command ended immediately, or the limits of `spec` are too small to start.
            SandboxStartError: The sandbox did not start.
        """
        ...

    async def restore(self, snapshot: str, spec: SandboxSpec) -> Sandbox:
        """Start a sandbox with the files of `snapshot`.

        Raises:
            SandboxRefusedError: As for `start`, or there is no such snapshot.
            SandboxEndedError: As for `start`, or the snapshot's files do not fit.
            SandboxStartError: As for `start`.
        """
        ...

    async def snapshot_bytes(self, snapshot: str) -> int:
        """Return the size of `snapshot` on disk; 0 if it does not exist."""
        ...

    async def remove_snapshot(self, snapshot: str) -> None:
        """Remove `snapshot`; idempotent. Sandboxes restored from it keep their files."""
        ...

    def capabilities(self) -> Mapping[str, bool]:
        """Return for each limit whether this machine enforces it.

        The limits are ``isolation``, ``network``, ``memory``, ``pids``, ``cpu``, ``disk``, ``uid`` and ``seccomp``.
        """
        ...


class SandboxPool(Protocol):
    """Leases sandboxes.

    Calls to a leased sandbox never hang: they raise `SandboxLostError` when the sandbox ends or becomes unresponsive.
    """

    def lease(
        self, spec: SandboxSpec, *, tenant: str = "", wait_s: float = 60.0
    ) -> AbstractAsyncContextManager[Sandbox]:
        """Lease a sandbox for the block, and stop it afterwards. A sandbox that was started in advance is preferred.

        Raises:
            ImpossibleSandboxError: No node is large enough, even if it were empty; raised without waiting.
            CapacityError: No capacity became free within `wait_s` seconds.
            SandboxRefusedError: No node grants `spec`.
            SandboxEndedError: Its command ended immediately, or the limits of `spec` are too small to start.
            SandboxStartError: The sandbox did not start.
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
        """Lease a sandbox under an id until the sandbox is stopped, or unused for `ttl_s` seconds.

        A repeated call returns the current view of the sandbox with this id. If that sandbox has ended by itself, the
        view says so, and no new sandbox starts. If it was stopped by `stop`, or never started, a new one is created.
        `snapshot` is a name that `Sandbox.snapshot` returned for a sandbox of this pool. The call waits up to `wait_s`
        seconds for capacity. If `wait_s` is None, the call waits only while warm sandboxes are being stopped to make
        room for the new one.

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
        """Return a sandbox by its id. Each use of the sandbox renews its lease.

        Args:
            id: Its id.
            tenant: Its tenant. Each tenant has its own ids.

        Raises:
            SandboxNotFoundError: There is no such sandbox.
            SandboxLostError: The sandbox has ended; the error contains the cause.
        """
        ...

    def view(self, id: str, *, tenant: str = "") -> SandboxView:
        """Inspect a sandbox without renewing its lease. Ended sandboxes stay visible for a while.

        Raises:
            SandboxNotFoundError: No such sandbox.
        """
        ...

    def views(self, *, tenant: str | None = None) -> Sequence[SandboxView]:
        """Return the views of a tenant's sandboxes, oldest first; None means all tenants."""
        ...

    async def stop(self, id: str, *, tenant: str = "") -> None:
        """Stop a sandbox and wait until it is fully removed; idempotent. An unknown id is no error."""
        ...

    def events(self, *, after: int = 0) -> AsyncIterator[PoolEvent]:
        """Yield the stored events with a number above `after`, then each new event when it happens."""
        ...


class ServerPool(SandboxPool, Protocol):
    """A sandbox pool in this process. Its owner runs servers in the sandboxes, and the pool can monitor them."""

    def watch(self, id: str, check: Callable[[], Awaitable[Cause]], on_end: Callable[[Cause], None]) -> None:
        """Add a check to the monitor of a leased sandbox, for example of the server that runs in it.

        Args:
            id: Id of the sandbox, which has no tenant and has not ended.
            check: Returns the cause when the server or other program that it checks has failed. The pool then
                counts the sandbox as lost. The check is cancelled when the sandbox has been removed.
            on_end: Called with the cause as soon as the sandbox ends for any reason.
        """
        ...

    def alert(self, kind: str, text: str) -> None:
        """Emit an event that is not about a single sandbox; at most one per minute and kind."""
        ...
