"""Access to sandboxes: finds them by the ids that callers use, runs programs in them, reads and writes files.

Memory for a large result is reserved before a call starts. If not enough memory is free, the call fails without having
had any effect, so the caller can repeat it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

import anyio

from envkit import clock
from envkit.errors import DeadlineError, EnvkitError, OptionError, RequestError, SandboxNotFoundError, UnreachableError
from envkit.http.auth.caller import Caller
from envkit.http.protocol import file_messages as files
from envkit.http.protocol import operations as table
from envkit.http.protocol import sandbox_messages as wire
from envkit.http.protocol.asgi import handles
from envkit.http.protocol.messages import DoneReply
from envkit.protocols import Sandbox, SandboxPool
from envkit.types import SandboxView, TenantKey

MAX_TIMEOUT_S = 3600.0
"""Maximum timeout of a command, in seconds."""

MAX_EXEC_BYTES = 32 << 20
"""Maximum size of a request body that contains a program or command and its input, in bytes."""

SLACK_S = 30.0
"""Seconds that the server waits for a sandbox's answer beyond the timeout of the command itself."""

FILE_S = 120.0
"""Timeout of reading or writing a file, in seconds."""

T = TypeVar("T")


class SandboxAccess:
    """Finds sandboxes of `pool`, and handles the operations inside them: programs, shell commands and files.

    Attributes:
        closing: Event that is set when the server shuts down. Running calls then finish, and no new calls start.
    """

    def __init__(self, pool: SandboxPool) -> None:
        self.pool = pool
        self.closing = anyio.Event()

    @handles(table.EXEC)
    async def exec(self, body: wire.ExecFrame, caller: Caller) -> wire.ExecReply:
        """Run a program in a sandbox and return its output when it has ended.

        If the caller disconnects, the program is killed. If the call has an idempotency key, the program continues
        instead, and the caller can repeat the call to get the output.
        """
        sandbox = self.find(body.sandbox_id, caller)
        self.check_timeout(body.timeout_s)
        run = partial(
            sandbox.exec,
            wire.decode_arguments(body.argv),
            timeout_s=body.timeout_s,
            env=body.env,
            cwd=body.cwd,
            stdin=body.stdin,
            user=body.user,
            max_output_bytes=body.max_output_bytes,
        )
        try:
            return wire.ExecReply.of(await within(body.timeout_s + SLACK_S, run))
        except ValueError as error:
            raise _refused("program", error) from None

    @handles(table.SHELL)
    async def shell(self, body: wire.ShellFrame, caller: Caller) -> wire.ExecReply:
        """Run a command in a persistent shell, which keeps its folder, variables and functions for later commands.

        If the caller disconnects, the command is killed. If the call has an idempotency key, the command continues
        instead, and the caller can repeat the call to get the output.
        """
        shell = self.find(body.sandbox_id, caller).shell(body.name, user=body.user)
        self.check_timeout(body.timeout_s)
        run = partial(shell.run, body.command, timeout_s=body.timeout_s, max_output_bytes=body.max_output_bytes)
        try:
            # Allow more than `body.timeout_s`, which does not include the wait for earlier commands of the shell.
            return wire.ExecReply.of(await within(MAX_TIMEOUT_S + SLACK_S, run))
        except ValueError as error:
            raise _refused("command", error) from None

    @handles(table.CLOSE_SHELL)
    async def close_shell(self, body: wire.CloseShellFrame, caller: Caller) -> DoneReply:
        """Close a shell and kill all processes that it started. The call is safe to repeat."""
        await within(SLACK_S, self.find(body.sandbox_id, caller).shell(body.name, user=body.user).close)
        return DoneReply()

    @handles(table.READ)
    async def read(self, body: files.ReadFrame, caller: Caller) -> files.FileReply:
        """Read a small file."""
        sandbox = self.find(body.sandbox_id, caller)
        read = partial(sandbox.read, body.path, max_bytes=body.max_bytes, user=body.user)
        return files.FileReply(await within(FILE_S, read))

    @handles(table.WRITE)
    async def write(self, body: files.WriteFrame, caller: Caller) -> DoneReply:
        """Write a small file atomically."""
        sandbox = self.find(body.sandbox_id, caller)
        await within(FILE_S, partial(sandbox.write, body.path, body.content, mode=body.mode, user=body.user))
        return DoneReply()

    def find(self, id: str, caller: Caller) -> Sandbox:
        """Return the sandbox that the caller names `id`, and renew its lease.

        Raises the same errors as `SandboxPool.get` and `usable_key`, and `UnreachableError` while the server shuts
        down.
        """
        self.refuse_when_closing()
        key = self.usable_key(id, caller)
        return self.pool.get(key.id, tenant=key.tenant)

    def usable_key(self, id: str, caller: Caller) -> TenantKey:
        """Return the key of the sandbox that the caller names `id`.

        Raises `SandboxNotFoundError` for the server's own sandboxes: administrators see their states, but only the
        server itself uses and stops them.
        """
        key = caller.key(id)
        if key.id.startswith(":") and not caller.own_prefix:
            raise SandboxNotFoundError(f"there is no sandbox {id!r} for clients: the server itself uses it")
        return key

    def view(self, id: str, caller: Caller) -> SandboxView:
        """Return the state of the sandbox that the caller names `id`, without renewing its lease."""
        key = caller.key(id)
        return self.pool.view(key.id, tenant=key.tenant)

    def reply(self, view: SandboxView, caller: Caller) -> wire.SandboxReply:
        """Convert the state of a sandbox to a reply that contains the caller's name for the sandbox."""
        return wire.SandboxReply.of(replace(view, id=caller.name(view.key)))

    async def cancel_when_closing(self, scope: anyio.CancelScope) -> None:
        """Wait until the server shuts down, and then cancel `scope`."""
        await self.closing.wait()
        scope.cancel()

    async def unless_closing(self, work: Callable[[], Awaitable[object]]) -> None:
        """Run `work` to its end; if the server shuts down before, cancel it and raise `UnreachableError`."""
        with anyio.CancelScope() as until_closing:
            async with clock.background_tasks() as tasks:
                tasks.start_soon(self.cancel_when_closing, until_closing)
                await work()
        if until_closing.cancelled_caught:
            raise UnreachableError("the server is shutting down; retry later")

    def check_timeout(self, timeout_s: float) -> None:
        """Raise `RequestError` if the timeout of a command is above `MAX_TIMEOUT_S`."""
        if timeout_s > MAX_TIMEOUT_S:
            raise RequestError(f"timeout_s must be at most {MAX_TIMEOUT_S:g}, got {timeout_s:g}")

    def refuse_when_closing(self) -> None:
        """Raise `UnreachableError` if the server is shutting down; called at the start of each call."""
        if self.closing.is_set():
            raise UnreachableError("the server is shutting down; retry later")


async def within(bound_s: float, work: Callable[[], Awaitable[T]]) -> T:
    """Run `work`; raise `DeadlineError` if it does not end within `bound_s` seconds."""
    with anyio.move_on_after(bound_s):
        return await work()
    raise DeadlineError(f"the sandbox did not answer within {bound_s:g} s")


def _refused(what: str, error: ValueError) -> EnvkitError:
    return error if isinstance(error, EnvkitError) else OptionError(what, str(error))
