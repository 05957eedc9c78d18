"""Protocols for starting processes on the machines of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from envkit.types import Node, Place


class Process(Protocol):
    """A process that a launcher started, with all its descendants."""

    @property
    def pid(self) -> int:
        """Pid on this machine of the process that stands for it: the leader of its session, or its relay."""
        ...

    @property
    def log(self) -> Path:
        """File on this machine with its output. It stays if the process ends by itself."""
        ...

    @property
    def returncode(self) -> int | None:
        """Exit code, or the negative number of the signal that ended it; None before `wait` or `kill` has returned."""
        ...

    async def wait(self) -> str:
        """Wait until it and its descendants have ended, and return why, in a few words."""
        ...

    async def kill(self, *, grace_s: float = 25.0) -> None:
        """End it and its descendants. Idempotent; cannot be cancelled.

        It gets SIGTERM and has `grace_s` seconds to end in order; then its log is deleted. With 0, all processes are
        ended within seconds, even if they are stopped or ignore SIGTERM, and the log stays.
        """
        ...


class Launcher(Protocol):
    """Starts processes on the nodes of a run. They end with the process that started them."""

    @property
    def nodes(self) -> Sequence[Node]:
        """The nodes; the first one is that of this process."""
        ...

    async def endpoint(self, node: str, port: int | None = None) -> tuple[str, int]:
        """Return the address and port for a server on a node; `port`, or one that is probably free.

        Raises:
            UsageError: There is no such node, or the port is in use.
        """
        ...

    async def start(self, argv: Sequence[str], env: Mapping[str, str], *, place: Place, name: str) -> Process:
        """Start a program. Call this in a thread that lives as long as the program: the event loop's.

        Args:
            argv: The program and its arguments.
            env: Variables besides those that processes on the node have.
            place: Where it runs.
            name: What it is, for the name of its log.

        Raises:
            UsageError: There is no such node, or the launcher does not work here.
        """
        ...
