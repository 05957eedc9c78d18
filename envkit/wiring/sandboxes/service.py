"""What ``envkit sandbox`` does with sandboxes, the same for those of this machine and those of a server."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, ClassVar

from envkit.errors import EnvkitError, UsageError
from envkit.types import SandboxSpec
from envkit.wiring.sandboxes.blocking import AnySandbox, spec_of
from envkit.wiring.sandboxes.terminal import run_attached


class SandboxService(ABC):
    """The sandboxes of this machine or of a server.

    Attributes:
        max_timeout_s: Maximum timeout of a program in seconds.
    """

    max_timeout_s: ClassVar[float]

    @abstractmethod
    def running(self, spec: SandboxSpec) -> AbstractAsyncContextManager[AnySandbox]:
        """Run a new sandbox for the duration of an ``async with`` block."""

    @abstractmethod
    def start_detached(self, spec: SandboxSpec) -> AbstractAsyncContextManager[AnySandbox]:
        """Start a detached sandbox. It outlives the ``async with`` block, unless the block raises."""

    @abstractmethod
    def attached(self, id: str) -> AbstractAsyncContextManager[AnySandbox]:
        """Connect to a detached sandbox for the duration of an ``async with`` block."""

    @abstractmethod
    async def stop(self, id: str) -> None:
        """Stop a detached sandbox and delete its files."""

    async def run(
        self,
        options: Mapping[str, Any],
        program: Sequence[str],
        uploads: Sequence[tuple[Path, str]],
        timeout_s: float | None,
        tty: bool,
    ) -> int:
        """Run a program (a shell if `program` is empty) in a new sandbox; return the code to exit this process with."""
        opened = self.running(spec_of(options))
        return await run_attached(opened, program, uploads, timeout_s=timeout_s or self.max_timeout_s, tty=tty)

    async def exec_in(self, id: str, program: Sequence[str], timeout_s: float | None, tty: bool) -> int:
        """Run a program (by default a shell) in a detached sandbox; return the code to exit this process with."""
        return await run_attached(self.attached(id), program, timeout_s=timeout_s or self.max_timeout_s, tty=tty)

    async def detach(
        self,
        options: Mapping[str, Any],
        program: Sequence[str],
        uploads: Sequence[tuple[Path, str]],
        report_id: Callable[[str], None],
    ) -> None:
        """Start a detached sandbox that runs `program`, copy `uploads` into it, and call `report_id` with its id."""
        if uploads and program:
            raise UsageError(
                "--upload: with --detach the program would start before the upload; leave the program out here, and "
                "run it with envkit sandbox exec"
            )
        async with self.start_detached(spec_of({**options, "command": program})) as sandbox:
            for source, name in uploads:
                await sandbox.upload(source, name)
            report_id(sandbox.id)

    async def log_of(self, id: str) -> str:
        """Return the end of what the program of a detached sandbox wrote to standard error."""
        async with self.attached(id) as sandbox:
            return await sandbox.log()

    async def remove(self, ids: Sequence[str]) -> None:
        """Stop detached sandboxes. If one cannot be stopped, the others are still stopped.

        Raises:
            ExceptionGroup: The errors of the sandboxes that could not be stopped.
        """
        failures = []
        for id in ids:
            try:
                await self.stop(id)
            except EnvkitError as error:
                failures.append(error)
        if failures:
            raise ExceptionGroup("cannot end sandboxes", failures)
