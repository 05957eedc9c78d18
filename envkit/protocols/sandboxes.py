"""What the parts of envkit ask of sandboxes, and of what lends them."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

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

if TYPE_CHECKING:
    pass


class Shell(Protocol):
    """A shell that stays: folder, variables and functions of one command are there for the next."""

    async def run(
        self, command: str, *, timeout_s: float = EXEC_TIMEOUT_S, max_output_bytes: int = 1 << 20
    ) -> ExecResult:
        """Run `command` and return what it wrote, as soon as it has ended; jobs in its background run on.

        Callers of one shell wait for each other, in the order in which they came. Standard input is empty.
        A command that takes longer than `timeout_s` seconds is stopped.

        Raises:
            SandboxLostError: The sandbox died.
        """
        ...

    async def close(self) -> None:
        """End the shell and everything that it started; safe to repeat."""
        ...


class Sandbox(Protocol):
    """One isolated place in which programs run. Files are named as inside."""

    @property
    def id(self) -> str: ...

    @property
    def grader_home(self) -> str:
        """A folder in memory of at most 64 MiB that only a grader can list, read or write, and the ``HOME`` of one.

        Where all are one user it is a folder like others, and keeps nothing from anybody: where a backend says so
        (``uid`` of `SandboxBackend.capabilities`), and in the profile ``"system"``, whose programs are all root.
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
        """Run a program to its end; a failing or slow one is a result, not an error.

        Everything that it started is ended with it. One that cannot be started has exit code 127 (not found) or 126.

        Args:
            argv: Program and arguments.
            timeout_s: Seconds until it is stopped; 60 where none are given.
            env: Variables beside those of the spec.
            cwd: Folder to start in; None for the workspace, and for a grader `grader_home`, since Python and other
                programs load modules and settings from where they start.
            stdin: What it reads.
            user: Who runs it; a grader can read what the agent wrote, and the agent nothing of what a grader leaves,
                unless its mode is changed (umask 077).
            max_output_bytes: How much of the end of each output is kept.

        Raises:
            SandboxLostError: The sandbox died.
            UnsupportedError: This sandbox has no such user.
        """
        ...

    def shell(self, name: str = "main", *, user: SandboxUser = "agent") -> Shell:
        """Return the shell `name`, which starts with its first command, in the folder in which `exec` does."""
        ...

    async def read(self, path: str, *, max_bytes: int = 64 << 20, user: FileUser = "agent") -> bytes:
        """Return the content of a file, as far as `user` may read it.

        Raises:
            MissingFileError: There is no such file, or it cannot be read.
            TooLargeError: It has more than `max_bytes`.
            SandboxLostError: The sandbox died.
            UnsupportedError: This sandbox has no such user.
        """
        ...

    async def write(self, path: str, content: bytes, *, mode: int | None = None, user: FileUser = "agent") -> None:
        """Write a file, as a whole or not at all; its folders are made.

        Only below `grader_home` is it certain that the agent's programs can neither read nor replace what a grader
        wrote, nor what leads to it.

        Args:
            path: Its name.
            content: What it is to hold.
            mode: Its mode; None is 0644, and 0600 for a grader's.
            user: Whose rights hold, and whom it and its folders belong to.

        Raises:
            RefusedFileError: It cannot be written.
            SandboxLostError: The sandbox died.
            UnsupportedError: This sandbox has no such user.
        """
        ...

    async def upload(self, source: Path, target: str, *, user: FileUser = "agent") -> None:
        """Copy a file or folder of the host into the box; `target` is its new name.

        Everything belongs to `user` then; what is a grader's is closed to the others. Raises as `write`.
        """
        ...

    async def download(self, source: str, target: Path, *, max_bytes: int = 1 << 30, user: FileUser = "agent") -> None:
        """Copy a file or folder of the box to the host; `target` is its new name and must not exist.

        Links that lead out of the folder, devices and absolute names are refused; what vanishes meanwhile is left out.

        Args:
            source: Its name in the box.
            target: Its name on the host.
            max_bytes: How much is taken at most.
            user: Who must be able to read all of it.

        Raises:
            MissingFileError: There is no such file, or it cannot be read.
            TooLargeError: It has more than `max_bytes`.
            RefusedFileError: It holds what must not be copied.
            SandboxLostError: The sandbox died.
            UnsupportedError: This sandbox has no such user.
        """
        ...

    async def connect(self, place: str | int) -> socket.socket:
        """Return a connected, non-blocking stream to a socket inside: the name of one in ``$ENVKIT_SOCKETS``, or a TCP
        port. The caller closes it.

        Raises:
            SandboxLostError: The sandbox died.
            UnreachableError: Nothing listens there.
        """
        ...

    async def probe(self, timeout_s: float) -> float:
        """Return the seconds that an answer from inside took.

        Raises:
            DeadlineError: None came within `timeout_s`.
            SandboxLostError: The sandbox died.
        """
        ...

    async def snapshot(self) -> str:
        """Keep the files as they are now, under a name that `SandboxBackend.restore` takes.

        What vanishes meanwhile is left out.

        Raises:
            UnsupportedError: This sandbox cannot.
        """
        ...

    async def wait(self) -> Cause:
        """Return, once the sandbox is gone, why."""
        ...

    async def stop(self) -> None:
        """End everything in it and remove its folder; safe to repeat."""
        ...


class SandboxBackend(Protocol):
    """Starts sandboxes of one kind. Used as ``async with``; leaving the block stops what it started."""

    async def start(self, spec: SandboxSpec) -> Sandbox:
        """Start one; it answers, and its command is running, when this returns.

        Raises:
            SandboxRefusedError: The backend cannot grant what `spec` asks for.
            SandboxEndedError: Its command ended at once, or its spec lets nothing start.
            SandboxStartError: It did not come up.
        """
        ...

    async def restore(self, snapshot: str, spec: SandboxSpec) -> Sandbox:
        """Start one whose files are those of `snapshot`.

        Raises:
            SandboxRefusedError: As `start`; or there is no such snapshot.
            SandboxEndedError: As `start`; or the snapshot's files do not find room in it.
            SandboxStartError: As `start`.
        """
        ...

    async def snapshot_bytes(self, snapshot: str) -> int:
        """Return how much of a disk `snapshot` takes; 0 if there is none."""
        ...

    async def remove_snapshot(self, snapshot: str) -> None:
        """Remove `snapshot`; safe to repeat. Sandboxes that began with its files keep them."""
        ...

    def capabilities(self) -> Mapping[str, bool]:
        """Say what is really enforced on this machine: ``isolation``, ``network``, ``memory``, ``pids``, ``cpu``,
        ``disk``, ``uid`` and ``seccomp``.
        """
        ...


class SandboxPool(Protocol):
    """Lends sandboxes.

    A call of one that is lent raises `SandboxLostError` as soon as the sandbox is known to be gone or hung; none hangs.
    """

    def lease(
        self, spec: SandboxSpec, *, tenant: str = "", wait_s: float = 60.0
    ) -> AbstractAsyncContextManager[Sandbox]:
        """Lend a sandbox for the length of the block, a warm one where there is one; it is stopped afterwards.

        Raises:
            ImpossibleSandboxError: No node could ever hold it; raised at once.
            CapacityError: None became free within `wait_s` seconds.
            SandboxRefusedError: No node grants what `spec` asks for.
            SandboxEndedError: Its command ended at once, or its spec lets nothing start.
            SandboxStartError: It was started and did not come up.
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
        """Lend a sandbox under a name until it is stopped or `ttl_s` seconds pass in which nobody uses it.

        The same call again returns the sandbox as it is now, also when it is over, so that nobody takes another one for
        it; but one that was stopped by `stop`, or never came up, is made anew. With `snapshot`, what
        `Sandbox.snapshot` of one of this pool has returned, it begins with those files. Who gives a `wait_s` waits so
        many seconds for room, in turn with all others; with None, only for what is being made.

        Raises:
            SandboxConflictError: The name belongs to a sandbox with another spec, or that began with other files.
            ImpossibleSandboxError, CapacityError, SandboxStartError: As `lease`.
            UnrecordedError: It cannot be written down, for who would have to know of it after a restart.
        """
        ...

    async def snapshot_bytes(self, snapshot: str) -> int:
        """Return how much of a disk a snapshot of one of this pool takes; 0 if it is gone."""
        ...

    async def remove_snapshot(self, snapshot: str) -> None:
        """Remove a snapshot of one of this pool; safe to repeat."""
        ...

    def get(self, id: str, *, tenant: str | None = None) -> Sandbox:
        """Return the sandbox of this name; using it renews its lease.

        Args:
            id: Its name.
            tenant: Who asks; the sandboxes of others are not found. None sees all.

        Raises:
            SandboxNotFoundError: There is none.
            SandboxLostError: It is gone; says why.
        """
        ...

    def view(self, id: str, *, tenant: str | None = None) -> SandboxView:
        """Look at a sandbox without using it; those that are over can be seen for a while.

        Raises:
            SandboxNotFoundError: There is none.
        """
        ...

    def views(self, *, tenant: str | None = None) -> Sequence[SandboxView]:
        """Look at all sandboxes, oldest first."""
        ...

    async def stop(self, id: str, *, tenant: str | None = None) -> None:
        """End a sandbox and wait until nothing is left of it; safe to repeat, also for one that does not exist."""
        ...

    def events(self, *, after: int = 0) -> AsyncIterator[PoolEvent]:
        """Give what happened since event number `after`, as far as it is remembered, and go on with what happens."""
        ...
