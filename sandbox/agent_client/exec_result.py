"""Encodes requests to run a program, and validates and decodes the agent's replies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import msgspec

from envkit.types import JSON, ExecResult, SandboxUser

from ..host.validation import check_bounds, fault_of_variables, fault_of_words
from .call import Reply


def fields_of(
    argv: Sequence[str],
    timeout_s: float,
    env: Mapping[str, str] | None,
    cwd: str | None,
    user: SandboxUser,
    max_output_bytes: int,
) -> dict[str, JSON]:
    """Validate the arguments of `AgentSandbox.exec` and return them as the fields of the agent's ``exec`` call.

    Raises:
        ValueError: `argv` is empty, a text is not a string or contains NUL, or a number is out of range.
    """
    if isinstance(argv, str) or not argv:
        raise ValueError(f"argv must be a program and its arguments, such as ['ls', '-l'], got {argv!r}")
    check_bounds(timeout_s, max_output_bytes)
    env = env or {}
    if (fault := fault_of_words((*argv, cwd or "")) or fault_of_variables(env)) is not None:
        raise ValueError(fault)
    return {
        "argv": list(argv),
        "env": {**env},
        "cwd": cwd,
        "timeout_s": timeout_s,
        "keep_bytes": max_output_bytes,
        "user": user,
    }


class _End(msgspec.Struct):
    cut: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
    duration_s: Annotated[float, msgspec.Meta(ge=0)]
    code: Annotated[int, msgspec.Meta(ge=-64, le=255)] | None = None
    timed_out: bool | None = None
    oom: bool | None = None
    state: Literal["kept", "lost"] = "kept"


def result_of(reply: Reply) -> ExecResult:
    """Decode and validate the reply with which the agent reports the result of a command.

    Raises:
        ValueError: A field is invalid; the message names it.
    """
    end = msgspec.convert(reply.end, _End)
    if end.code is None and not end.timed_out:
        raise ValueError("a result without exit code")
    return ExecResult(
        exit_code=None if end.timed_out else end.code,
        stdout_bytes=reply.out,
        stderr_bytes=reply.err,
        timed_out=end.timed_out is True,
        truncated_bytes=end.cut,
        duration_s=end.duration_s,
        is_shell_lost=end.state == "lost",
        is_out_of_memory=end.oom is True,
    )
