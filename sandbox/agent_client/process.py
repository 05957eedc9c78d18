"""A running program in a sandbox, with streamed input and output."""

from __future__ import annotations

from contextlib import suppress

from envkit.errors import SandboxLostError
from envkit.types import ExecResult

from .call import MAX_BODY_BYTES, AgentCalls, Call, ChannelEndedError, Reply


class Program:
    """A running program with streamed input and output; `AgentSandbox.program` creates it."""

    def __init__(self, sandbox: AgentCalls, call: Call, *, has_terminal: bool) -> None:
        self._sandbox = sandbox
        self._call = call
        self._has_terminal = has_terminal

    async def receive(self) -> tuple[str, bytes] | None:
        """Wait for output; return its stream (``"out"`` or ``"err"``) and its content, or None at the end of output.

        Raises:
            SandboxLostError: The sandbox is gone.
        """
        try:
            return await self._call.receive()
        except ChannelEndedError:
            raise SandboxLostError(self._sandbox.id, await self._sandbox.wait()) from None

    async def send(self, content: bytes) -> None:
        """Send input; wait while the program does not read. Does nothing if the program or the sandbox has ended."""
        with suppress(ChannelEndedError):
            if not self._has_terminal:
                await self._call.send_within_window(content)
                return
            for start in range(0, len(content), MAX_BODY_BYTES):
                if not self._call.is_over:
                    await self._call.send({"more": True}, content[start : start + MAX_BODY_BYTES])

    async def send_eof(self) -> None:
        """Send the end of input; if the program has a terminal, send Ctrl-D instead."""
        if not self._call.is_over:
            with suppress(ChannelEndedError):
                await self._call.send({"eof": True})

    async def resize(self, rows: int, columns: int) -> None:
        """Resize the terminal of the program."""
        if not self._call.is_over:
            await self._sandbox.call("resize", of=self._call.id, rows=rows, cols=columns)

    async def result(self) -> ExecResult:
        """Return the program's result without any output. Call it only after `receive` has returned None."""
        end = self._call.end
        if end is None:
            raise RuntimeError("the program has not ended; call receive until it returns None")
        return await self._sandbox.result(Reply(end))
