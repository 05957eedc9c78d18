"""A persistent shell in a sandbox."""

from __future__ import annotations

from envkit import clock
from envkit.types import EXEC_TIMEOUT_S, ExecResult, SandboxUser

from ..host.validation import check_bounds
from .call import AgentCalls

_CHANGE_S = 5.0
"""Seconds that a shell may take to end one command that is out of time and to begin the next."""


class AgentShell:
    """A shell that stays; satisfies `envkit.protocols.Shell`. Made by `Box.shell`.

    Args:
        box: Where it is.
        name: Its name there.
        user: Who runs it.
    """

    def __init__(self, box: AgentCalls, name: str, user: SandboxUser) -> None:
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
