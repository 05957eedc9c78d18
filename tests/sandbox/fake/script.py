"""Fates and answers of scripted sandboxes (`tests.sandbox.fake.backend`).

A script returns the `Fate` of each sandbox from its number and a random generator, which is seeded from the backend's
seed and that number. So the same script gives the same sandboxes in any order of calls.
"""

from __future__ import annotations

import math
import random
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from envkit.types import Cause, CauseKind, ExecResult, SandboxUser


@dataclass(frozen=True, slots=True)
class Command:
    """A command that a sandbox runs.

    Attributes:
        argv: Program and arguments; ``("sh", "-c", command)`` for the command of a shell.
        env: Variables in addition to those of the spec.
        cwd: Working directory.
        stdin: Its standard input.
        user: Its user.
        shell: Name of its shell; None for `exec`.
        files: The sandbox's files by full path; it may change them.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str
    stdin: bytes
    user: SandboxUser
    shell: str | None
    files: dict[str, bytes]


Answer: TypeAlias = Callable[[Command], ExecResult]
"""Returns the result of a command, which takes its ``duration_s``, or less if the timeout stops it."""


def succeed(command: Command) -> ExecResult:
    """Let a command succeed at once without output."""
    return ExecResult(0)


_KILLED = Cause(CauseKind.KILLED, "killed by signal 9 (SIGKILL)")


@dataclass(frozen=True, slots=True)
class Fate:
    """How one sandbox behaves. Times in seconds.

    Attributes:
        start_s: Time until it is ready.
        start_failure: Cause of a failed start after that time; None if it starts.
        dies_after_s: Time from ready to its death; infinity for never.
        cause: Cause of its death.
        hangs_after_s: Time from ready until it stops answering; infinity for never.
        answer: Returns the results of its commands.
        listens: Listeners by socket name or port; each receives the other end of a connection.
    """

    start_s: float = 0.0
    start_failure: Cause | str | None = None
    dies_after_s: float = math.inf
    cause: Cause = _KILLED
    hangs_after_s: float = math.inf
    answer: Answer = succeed
    listens: Mapping[str | int, Callable[[socket.socket], None]] = field(default_factory=dict)


Script: TypeAlias = Callable[[int, random.Random], Fate]
