"""What becomes of scripted boxes (`tests.sandbox.fake.backend`), and what they answer.

A box's `Fate` says it. A script gives the fates: a function of the box's number and of a generator that is seeded from
the backend's seed and that number. So the same script gives the same boxes, in whatever order things are asked of them.
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
    """What a box is asked to run.

    Attributes:
        argv: Program and arguments; of a shell's command ``("sh", "-c", command)``.
        env: Variables beside those of the spec.
        cwd: Folder to start in.
        stdin: What it reads.
        user: Who runs it.
        shell: Name of the shell that it runs in; None for a program of its own.
        files: The box's files by their full names, which it may change.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str
    stdin: bytes
    user: SandboxUser
    shell: str | None
    files: dict[str, bytes]


Answer: TypeAlias = Callable[[Command], ExecResult]
"""What a command does; it takes the ``duration_s`` of its result, and is stopped when it has no more than that."""


def succeed(command: Command) -> ExecResult:
    """Any command is a success that takes no time and says nothing."""
    return ExecResult(0)


_KILLED = Cause(CauseKind.KILLED, "killed by signal 9 (SIGKILL)")


@dataclass(frozen=True, slots=True)
class Fate:
    """What becomes of one box. Times in seconds.

    Attributes:
        start_s: Until it is ready.
        start_failure: Why it does not become ready after that; None where it does.
        dies_after_s: From being ready to its death; infinity for never.
        cause: Why it dies.
        hangs_after_s: From being ready to where it answers nothing any more; infinity for never.
        answer: What its commands do.
        listens: By the names of its sockets and its ports: takes the other end of each connection.
    """

    start_s: float = 0.0
    start_failure: Cause | str | None = None
    dies_after_s: float = math.inf
    cause: Cause = _KILLED
    hangs_after_s: float = math.inf
    answer: Answer = succeed
    listens: Mapping[str | int, Callable[[socket.socket], None]] = field(default_factory=dict)


Script: TypeAlias = Callable[[int, random.Random], Fate]
