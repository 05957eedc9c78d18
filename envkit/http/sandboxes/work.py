"""Runs programs and shell commands in sandboxes, and reads and writes files.

Memory for the result is reserved before a call starts. If there is not enough memory, the call fails before it had any
effect, so the caller can repeat it.
"""

from __future__ import annotations

from functools import partial

from envkit.errors import (
    EnvkitError,
    OptionError,
    RequestError,
    TooLargeError,
)
from envkit.http.auth.caller import Caller
from envkit.http.limits.memory_budget import Reservation
from envkit.http.protocol import sandbox_messages as wire
from envkit.http.protocol.bytes_encoding import decode_arguments
from envkit.http.protocol.messages import DoneReply
from envkit.http.sandboxes.idempotency import CallOutcome
from envkit.http.sandboxes.lookup import SLACK_S, SandboxLookup, within

_FIRST_FILE_BYTES = 1 << 20
"""Limit of the first read of a file whose size is unknown; a larger file is read a second time."""

_SMALL_OUTPUT_BYTES = 2 << 20
"""Output limit, bytes, up to which no memory is reserved."""

_FILE_S = 120.0


class SandboxWork:
    """The operations inside a sandbox: programs, shell commands and files.

    Args:
        access: Finds sandboxes by the ids that callers use.
    """

    def __init__(self, access: SandboxLookup) -> None:
        self._access = access

    async def exec(self, body: wire.ExecFrame, caller: Caller) -> CallOutcome:
        sandbox = self._access.find(body.sandbox_id, caller)
        self._access.check_timeout(body.timeout_s)

        async def run() -> wire.ExecReply:
            try:
                result = await sandbox.exec(
                    decode_arguments(body.argv),
                    timeout_s=body.timeout_s,
                    env=body.env,
                    cwd=body.cwd,
                    stdin=body.stdin,
                    user=body.user,
                    max_output_bytes=body.max_output_bytes,
                )
            except ValueError as error:
                raise _refused("program", error) from None
            return wire.ExecReply.of(result)

        return await self._access.run_idempotent(body, caller, run, body.timeout_s + SLACK_S)

    async def shell(self, body: wire.ShellFrame, caller: Caller) -> CallOutcome:
        shell = self._access.find(body.sandbox_id, caller).shell(body.shell, user=body.user)
        self._access.check_timeout(body.timeout_s)

        async def run() -> wire.ExecReply:
            try:
                result = await shell.run(body.command, timeout_s=body.timeout_s, max_output_bytes=body.max_output_bytes)
            except ValueError as error:
                raise _refused("command", error) from None
            return wire.ExecReply.of(result)

        # No deadline for the queue: earlier commands of this shell run first, each with its own timeout.
        return await self._access.run_idempotent(body, caller, run, self._access.max_timeout_s + SLACK_S)

    async def close_shell(self, body: wire.CloseShellFrame, caller: Caller) -> DoneReply:
        shell = self._access.find(body.sandbox_id, caller).shell(body.shell, user=body.user)
        with self._access.with_caller_ids(body.sandbox_id, caller):
            await within(SLACK_S, shell.close)
        return DoneReply()

    async def read(self, body: wire.ReadFrame, caller: Caller) -> wire.FileReply:
        return wire.FileReply(await self.read_file(body, caller))

    async def read_file(self, body: wire.ReadFrame, caller: Caller, reservation: Reservation | None = None) -> bytes:
        """Return the content of a file.

        Args:
            body: The request; over the WebSocket only small files can be read.
            caller: The caller.
            reservation: Memory for a large file; None without a limit.
        """
        sandbox, path = self._access.find(body.sandbox_id, caller), _path(body.path)
        first_bytes = min(body.max_bytes, _FIRST_FILE_BYTES)
        with self._access.with_caller_ids(body.sandbox_id, caller):
            try:
                return await within(_FILE_S, partial(sandbox.read, path, max_bytes=first_bytes, user=body.user))
            except TooLargeError:
                if first_bytes == body.max_bytes:
                    raise
            if reservation is not None:
                await reservation.reserve(body.max_bytes)
            return await within(_FILE_S, partial(sandbox.read, path, max_bytes=body.max_bytes, user=body.user))

    async def write(self, body: wire.WriteFrame, caller: Caller) -> CallOutcome:
        sandbox = self._access.find(body.sandbox_id, caller)
        path = _path(body.path)

        async def run() -> DoneReply:
            await sandbox.write(path, body.content, mode=body.mode, user=body.user)
            return DoneReply()

        return await self._access.run_idempotent(body, caller, run, _FILE_S)


def bytes_to_reserve(body: wire.ExecBody | wire.ShellBody) -> int:
    """Return the number of bytes to reserve for the output of a program before it starts.

    If the output limit of the program is large, the whole limit is reserved. If it is small, only a part of it is
    reserved, because thousands of programs may run for hours and few of them reach their limit. When the program has
    ended, the actual size of the output is counted.
    """
    return 2 * body.max_output_bytes if body.max_output_bytes > _SMALL_OUTPUT_BYTES else 0


def _refused(what: str, error: ValueError) -> EnvkitError:
    return error if isinstance(error, EnvkitError) else OptionError(what, str(error))


def _path(path: str) -> str:
    if "\0" in path:
        raise RequestError("a path cannot contain NUL")
    return path
