"""A program in a box whose output is wanted while it runs, and that reads what it is sent."""

from __future__ import annotations

from contextlib import suppress

from envkit.errors import SandboxLostError
from envkit.types import ExecResult

from .call import MAX_BODY_BYTES, AgentCalls, Call, ChannelEndedError, Reply


class Program:
    """One program; made by `Box.program`."""

    def __init__(self, box: AgentCalls, call: Call, *, has_terminal: bool) -> None:
        self._box = box
        self._call = call
        self._has_terminal = has_terminal

    async def receive(self) -> tuple[str, bytes] | None:
        """Return the next piece of output and what it is of, ``"out"`` or ``"err"``; None once it has ended.

        Raises:
            SandboxLostError: The box is gone.
        """
        try:
            return await self._call.receive()
        except ChannelEndedError:
            raise SandboxLostError(self._box.id, await self._box.wait()) from None

    async def send(self, content: bytes) -> None:
        """Have it read `content`, waiting while it reads nothing; silent once it or its box has ended."""
        with suppress(ChannelEndedError):
            if not self._has_terminal:
                await self._call.send_within_window(content)
                return
            for start in range(0, len(content), MAX_BODY_BYTES):
                if not self._call.is_over:
                    await self._call.send({"more": True}, content[start : start + MAX_BODY_BYTES])

    async def send_eof(self) -> None:
        """Have it see the end of its input; of a terminal, what Ctrl-D does."""
        if not self._call.is_over:
            with suppress(ChannelEndedError):
                await self._call.send({"eof": True})

    async def resize(self, rows: int, columns: int) -> None:
        """Give its terminal another size."""
        if not self._call.is_over:
            await self._box.call("resize", of=self._call.id, rows=rows, cols=columns)

    async def result(self) -> ExecResult:
        """Return what became of it, without its output, once `receive` has returned None."""
        end = self._call.end
        if end is None:
            raise RuntimeError("the result of a program that has not ended")
        return await self._box.result(Reply(end))
