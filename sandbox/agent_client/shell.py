"""A shell in a box, and what the agent says that a command did."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from envkit import clock
from envkit.types import EXEC_TIMEOUT_S, JSON, ExecResult, SandboxUser

from ..host.validation import check_bounds

if TYPE_CHECKING:
    from .channel import Reply
    from .sandbox import Box

_CHANGE_S = 5.0
"""Seconds that a shell may take to end one command that is out of time and to begin the next."""


class BoxShell:
    """A shell that stays; satisfies `envkit.protocols.Shell`. Made by `Box.shell`.

    Args:
        box: Where it is.
        name: Its name there.
        user: Who runs it.
    """

    def __init__(self, box: Box, name: str, user: SandboxUser) -> None:
        self._box = box
        self._name = f"{user}:{name}"
        self._user = user
        self._queued = 0
        self._free_at = 0.0

    async def run(
        self, command: str, *, timeout_s: float = EXEC_TIMEOUT_S, max_output_bytes: int = 1 << 20
    ) -> ExecResult:
        """Run `command`; see `envkit.protocols.Shell.run`. `timeout_s` counts from its turn.

        Raises:
            ValueError: `command` holds NUL, or has more than 1 MiB.
        """
        if "\0" in command:
            raise ValueError("a shell's command cannot hold NUL")
        check_bounds(timeout_s, max_output_bytes)
        now = clock.now()
        begins = max(now, self._free_at) if self._queued else now
        self._free_at = begins + timeout_s + _CHANGE_S
        self._queued += 1
        try:
            reply = await self._box.call(
                "shell",
                queue_s=begins - now,
                name=self._name,
                command=command,
                timeout_s=timeout_s,
                keep_bytes=max_output_bytes,
                user=self._user,
            )
        finally:
            self._queued -= 1
        return await self._box.result(reply)

    async def close(self) -> None:
        """End the shell and everything that it started; safe to repeat."""
        await self._box.call("close_shell", name=self._name)


def result_of(reply: Reply) -> ExecResult:
    """Return what the agent says that a command did.

    Raises:
        ValueError: It says it wrongly; the message names the field.
    """
    end = reply.end
    timed_out = _flag(end, "timed_out")
    code = end.get("code")
    if timed_out:
        code = None
    elif type(code) is not int or not -64 <= code <= 255:
        raise ValueError("an exit code that is none")
    cut = end.get("cut")
    if type(cut) is not int or not 0 <= cut < 1 << 63:
        raise ValueError("a number of dropped bytes that is none")
    duration_s = end.get("duration_s")
    if type(duration_s) not in (int, float) or not (isinstance(duration_s, (int, float)) and _is_sane(duration_s)):
        raise ValueError("a duration that is none")
    state = end.get("state", "kept")
    if state not in ("kept", "lost"):
        raise ValueError("a state of a shell that is none")
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
        raise ValueError(f"{name} that is neither true nor false")
    return value is True


def _is_sane(seconds: float) -> bool:
    return math.isfinite(seconds) and seconds >= 0
