"""Encodes requests to run a program, and validates and decodes the agent's replies."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

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


def result_of(reply: Reply) -> ExecResult:
    """Decode and validate the reply with which the agent reports the result of a command.

    Raises:
        ValueError: A field is invalid; the message names it.
    """
    end = reply.end
    timed_out = _flag(end, "timed_out")
    code = end.get("code")
    if timed_out:
        code = None
    elif type(code) is not int or not -64 <= code <= 255:
        raise ValueError("an invalid exit code")
    cut = end.get("cut")
    if type(cut) is not int or not 0 <= cut < 1 << 63:
        raise ValueError("an invalid number of dropped bytes")
    duration_s = end.get("duration_s")
    if isinstance(duration_s, bool) or not isinstance(duration_s, (int, float)) or not 0 <= duration_s < math.inf:
        raise ValueError("an invalid duration")
    state = end.get("state", "kept")
    if state not in ("kept", "lost"):
        raise ValueError("an invalid shell state")
    return ExecResult(
        exit_code=code,
        stdout_bytes=reply.out,
        stderr_bytes=reply.err,
        timed_out=timed_out,
        truncated_bytes=cut,
        duration_s=float(duration_s),
        is_shell_lost=state == "lost",
        is_out_of_memory=_flag(end, "oom"),
    )


def _flag(end: dict[str, JSON], name: str) -> bool:
    value = end.get(name)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{name} is not a boolean")
    return value is True
