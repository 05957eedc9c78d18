"""Persistent shells in a sandbox, and running programs with streamed input and output."""

from __future__ import annotations

from contextlib import suppress

from envkit import clock, protocols
from envkit.errors import SandboxLostError
from envkit.types import EXEC_TIMEOUT_S, ExecResult, SandboxUser

from ..host.validation import check_bounds
from .call import AgentCalls, Call, ChannelEndedError, Reply

_CHANGE_S = 5.0
"""Maximum number of seconds that a shell takes to end a timed-out command and start the next one."""


class AgentShell(protocols.Shell):
    """A persistent shell; implements `envkit.protocols.Shell`. `AgentSandbox.shell` creates it."""

    def __init__(self, sandbox: AgentCalls, name: str, user: SandboxUser) -> None:
        self._sandbox = sandbox
        self._name = f"{user}:{name}"
        self._user = user
        self._queued = 0
        self._free_at = 0.0

    async def run(
        self, command: str, *, timeout_s: float = EXEC_TIMEOUT_S, max_output_bytes: int = 1 << 20
    ) -> ExecResult:
        """Run `command`; see `envkit.protocols.Shell.run`.

        `timeout_s` does not include the time that the command waits for earlier commands of this shell.

        Raises:
            ValueError: `command` contains NUL or exceeds 1 MiB.
        """
        if "\0" in command:
            raise ValueError("a shell command cannot contain NUL")
        check_bounds(timeout_s, max_output_bytes)
        now = clock.now()
        begins = max(now, self._free_at) if self._queued else now
        self._free_at = begins + timeout_s + _CHANGE_S
        self._queued += 1
        try:
            reply = await self._sandbox.call(
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
        return await self._sandbox.result(reply)

    async def close(self) -> None:
        await self._sandbox.call("close_shell", name=self._name)


class Program(protocols.Program):
    """A running program with streamed input and output; `AgentSandbox.program` creates it."""

    def __init__(self, sandbox: AgentCalls, call: Call, *, has_terminal: bool) -> None:
        self._sandbox = sandbox
        self._call = call
        self._has_terminal = has_terminal

    async def receive(self) -> tuple[str, bytes] | None:
        try:
            return await self._call.receive()
        except ChannelEndedError:
            raise SandboxLostError(self._sandbox.id, await self._sandbox.wait()) from None

    async def send(self, content: bytes) -> None:
        """Send input; do nothing if the program or the sandbox has ended."""
        with suppress(ChannelEndedError):
            if self._has_terminal:
                await self._call.feed_piece(content)
            else:
                await self._call.send_within_window(content)

    async def send_eof(self) -> None:
        if not self._call.is_over:
            with suppress(ChannelEndedError):
                await self._call.send({"eof": True})

    async def resize(self, rows: int, columns: int) -> None:
        if not self._call.is_over:
            await self._sandbox.call("resize", of=self._call.id, rows=rows, cols=columns)

    async def result(self) -> ExecResult:
        end = self._call.end
        if end is None:
            raise RuntimeError("the program has not ended; call receive until it returns None")
        return await self._sandbox.result(Reply(end))
