"""What is done in sandboxes: programs, commands of shells, and files, with room for what is answered.

There is room before anything is begun, since not everything is safe to repeat.
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
from envkit.http.limits.memory_budget import LITTLE_BYTES, Reservation
from envkit.http.protocol import sandbox_messages as wire
from envkit.http.protocol.bytes_encoding import decode_arguments
from envkit.http.protocol.messages import DoneReply
from envkit.http.sandboxes.idempotency import CallOutcome
from envkit.http.sandboxes.lookup import SLACK_S, SandboxLookup, within

_LITTLE_FILE_BYTES = 1 << 20
"""A file is not expected to be larger; one that is, is asked for again."""

_USUALLY = 16
"""How many times as much a program may say as most do, at least."""

_FILE_S = 120.0


class SandboxWork:
    """The calls that do something in a sandbox.

    Args:
        access: Leads to it.
    """

    def __init__(self, access: SandboxLookup) -> None:
        self._access = access

    async def exec(self, body: wire.ExecFrame, caller: Caller, room: Reservation) -> CallOutcome:
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

        await room.expect(room_for(body))
        return await self._access.once(body, caller, run, body.timeout_s + SLACK_S, room)

    async def shell(self, body: wire.ShellFrame, caller: Caller, room: Reservation) -> CallOutcome:
        shell = self._access.find(body.sandbox_id, caller).shell(body.shell, user=body.user)
        self._access.check_timeout(body.timeout_s)

        async def run() -> wire.ExecReply:
            try:
                result = await shell.run(body.command, timeout_s=body.timeout_s, max_output_bytes=body.max_output_bytes)
            except ValueError as error:
                raise _refused("command", error) from None
            return wire.ExecReply.of(result)

        await room.expect(room_for(body))
        # Others may be before us, each with a time of its own.
        return await self._access.once(body, caller, run, self._access.max_timeout_s + SLACK_S, room)

    async def close_shell(self, body: wire.CloseShellFrame, caller: Caller) -> DoneReply:
        shell = self._access.find(body.sandbox_id, caller).shell(body.shell, user=body.user)
        with self._access.naming(body.sandbox_id, caller):
            await within(SLACK_S, shell.close)
        return DoneReply()

    async def read(self, body: wire.ReadFrame, caller: Caller, room: Reservation) -> CallOutcome:
        async def work() -> wire.FileReply:
            return wire.FileReply(await self.read_file(body, caller, room))

        return await self._access.outcome(work)

    async def read_file(self, body: wire.ReadFrame, caller: Caller, room: Reservation) -> bytes:
        """Return the content of a file, which a frame could not hold if it is large."""
        sandbox, path = self._access.find(body.sandbox_id, caller), _path(body.path)
        little = min(body.max_bytes, _LITTLE_FILE_BYTES)
        await room.expect(little)
        with self._access.naming(body.sandbox_id, caller):
            try:
                return await within(_FILE_S, partial(sandbox.read, path, max_bytes=little, user=body.user))
            except TooLargeError:
                if little == body.max_bytes:
                    raise
            room.settle(0)
            await room.expect(body.max_bytes)
            return await within(_FILE_S, partial(sandbox.read, path, max_bytes=body.max_bytes, user=body.user))

    async def write(self, body: wire.WriteFrame, caller: Caller, room: Reservation) -> CallOutcome:
        sandbox = self._access.find(body.sandbox_id, caller)
        path = _path(body.path)

        async def run() -> DoneReply:
            await sandbox.write(path, body.content, mode=body.mode, user=body.user)
            return DoneReply()

        return await self._access.once(body, caller, run, _FILE_S, room)


def room_for(body: wire.ExecBody | wire.ShellBody) -> int:
    """Return the bytes that a program is given room for before it begins.

    They are what its two outputs may have together where that is much, and otherwise a part of that: programs may run
    for hours, by the thousand, and few say as much as they may. What one does say is counted once it is there.
    """
    most = 2 * body.max_output_bytes
    return most if most > LITTLE_BYTES else most // _USUALLY


def _refused(what: str, error: ValueError) -> EnvkitError:
    return error if isinstance(error, EnvkitError) else OptionError(what, str(error))


def _path(path: str) -> str:
    if "\0" in path:
        raise RequestError("a path cannot hold NUL")
    return path
