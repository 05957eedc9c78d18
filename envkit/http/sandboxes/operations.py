"""The operations on sandboxes, which HTTP and WebSocket share. WebSocket frames name an operation by its method.

Each operation has a timeout, so that a call ends even if its sandbox hangs.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Protocol, TypeAlias, runtime_checkable

import anyio
import msgspec
from anyio.abc import TaskGroup

from envkit.errors import (
    EnvkitError,
    OptionError,
    RequestError,
    SandboxNotFoundError,
    TooLargeError,
    UnsupportedError,
    did_you_mean,
)
from envkit.http.auth.caller import Caller
from envkit.http.auth.sandbox_policy import SandboxPolicy
from envkit.http.protocol import sandbox_messages as wire
from envkit.http.protocol.messages import DoneReply, Frame, NoBody, Problem, read, write
from envkit.http.sandboxes.idempotency import CallOutcome
from envkit.http.sandboxes.lookup import MAX_TIMEOUT_S, SLACK_S, SandboxLookup, seen_by, within
from envkit.http.sandboxes.pending_starts import PendingStarts, StartRequest
from envkit.http.sandboxes.snapshot_quota import SnapshotBounds, Snapshots
from envkit.http.sandboxes.work import SandboxWork
from envkit.protocols import SandboxPool
from envkit.types import JSON, why_no_network

PREFIX = "sandbox."
"""Prefix of the methods of frames."""

_MAX_SPEC_BYTES = 128 << 10
"""Limit on the size of a sandbox's spec. The server stores specs for a while after their sandboxes have ended."""

_STOP_S = 60.0
_WAIT_S = 25.0

Call: TypeAlias = Callable[[Any, Caller], Awaitable[object]]


@runtime_checkable
class Logging(Protocol):
    """A sandbox that stores what its command writes to standard error."""

    async def log(self) -> str: ...


@runtime_checkable
class Measured(Protocol):
    """A sandbox that reports its resource usage."""

    async def stats(self) -> Mapping[str, JSON]: ...


class SandboxOperations:
    """The operations on sandboxes in version 1 of the protocol.

    Args:
        pool: Leases sandboxes.
        problem: Converts an error to the JSON problem that the caller receives.
        max_timeout_s: Maximum timeout of a command, in seconds.
        ttl_s: Maximum seconds without use after which a sandbox is stopped; None for no maximum.
        policy: Which sandboxes callers may request.
        snapshots: Limits on the number and size of snapshots.

    Attributes:
        access: Finds sandboxes by the ids that callers use.
        work: The operations inside a sandbox: programs, shells and files.
    """

    def __init__(
        self,
        pool: SandboxPool,
        problem: Callable[[Exception], Problem],
        *,
        max_timeout_s: float = MAX_TIMEOUT_S,
        ttl_s: float | None = None,
        policy: SandboxPolicy | None = None,
        snapshots: SnapshotBounds | None = None,
    ) -> None:
        self.access = SandboxLookup(pool, problem, max_timeout_s=max_timeout_s)
        self.work = work = SandboxWork(self.access)
        self._policy = policy or SandboxPolicy()
        self._starts = PendingStarts(pool, self.access.keyed_calls.drop, ttl_s=ttl_s)
        self._snapshots = Snapshots(pool, snapshots or SnapshotBounds())
        self._methods: Mapping[str, tuple[msgspec.json.Decoder[Any], Call]] = {
            "create": (msgspec.json.Decoder(wire.CreateFrame), self.create),
            "view": (msgspec.json.Decoder(wire.SandboxFrame), self.view),
            "list": (msgspec.json.Decoder(NoBody), self.views),
            "exec": (msgspec.json.Decoder(wire.ExecFrame), work.exec),
            "shell": (msgspec.json.Decoder(wire.ShellFrame), work.shell),
            "close_shell": (msgspec.json.Decoder(wire.CloseShellFrame), work.close_shell),
            "read": (msgspec.json.Decoder(wire.ReadFrame), work.read),
            "write": (msgspec.json.Decoder(wire.WriteFrame), work.write),
            "snapshot": (msgspec.json.Decoder(wire.SnapshotFrame), self.snapshot),
            "snapshots": (msgspec.json.Decoder(NoBody), self.snapshots),
            "remove_snapshot": (msgspec.json.Decoder(wire.KeptFrame), self.remove_snapshot),
            "probe": (msgspec.json.Decoder(wire.ProbeFrame), self.probe),
            "wait": (msgspec.json.Decoder(wire.SandboxFrame), self.wait),
            "log": (msgspec.json.Decoder(wire.SandboxFrame), self.log),
            "stats": (msgspec.json.Decoder(wire.SandboxFrame), self.stats),
            "stop": (msgspec.json.Decoder(wire.SandboxFrame), self.stop),
            "cancel": (msgspec.json.Decoder(wire.CancelFrame), self.cancel),
        }

    def methods(self) -> dict[str, type]:
        """Return the methods of the WebSocket with the types of their parameters."""
        return {f"{PREFIX}{name}": decoder.type for name, (decoder, _) in self._methods.items()}

    def run_in(self, tasks: TaskGroup) -> None:
        """Set the task group that runs calls which continue after their caller disconnects."""
        self.access.keyed_calls.tasks = self._starts.tasks = tasks

    async def answer(self, frame: Frame, caller: Caller, used: set[str]) -> CallOutcome:
        """Answer a frame; an error becomes an outcome.

        Args:
            frame: The request.
            caller: The caller.
            used: Ids of the sandboxes that the caller uses; the id of this frame's sandbox is added.
        """
        name = frame.method.removeprefix(PREFIX)
        try:
            if name not in self._methods:
                hint = did_you_mean(frame.method, [f"{PREFIX}{one}" for one in self._methods])
                raise RequestError(f"unknown method {frame.method[:100]!r}{hint}")
            decoder, call = self._methods[name]
            body = read(frame.params, decoder)
        except EnvkitError as error:
            return self.access.failure(error)
        if name == "stop":
            used.discard(body.sandbox_id)
        elif name not in ("list", "view", "snapshots", "remove_snapshot"):
            used.add(body.sandbox_id)
        return await self.access.outcome(partial(call, body, caller))

    def keep(self, used: set[str], caller: Caller) -> None:
        """Renew the leases of all sandboxes whose ids are in `used`, and remove the ids of ended sandboxes from
        `used`.
        """
        for id in list(used):
            if caller.key(id) not in self._starts:
                try:
                    self.access.pool.get(caller.key(id), tenant=seen_by(caller))
                except EnvkitError:
                    used.discard(id)

    async def create(self, body: wire.CreateFrame, caller: Caller) -> wire.SandboxReply:
        """Start a sandbox and return its state. The start continues if the caller disconnects."""
        self.access.refuse_when_closing()
        snapshot = None if body.snapshot is None else self._snapshots.pool_id(body.snapshot, seen_by(caller))
        if len(write(body)) > _MAX_SPEC_BYTES:
            raise TooLargeError(
                f"the spec of a sandbox exceeds {_MAX_SPEC_BYTES} bytes; write large contents into files of the sandbox"
            )
        spec = body.spec()
        if (why := why_no_network(spec.network)) is not None:
            raise OptionError("network", why)
        self._policy.require(spec, caller)
        request = StartRequest(caller.key(body.sandbox_id), spec, caller.tenant, body.lease_s, snapshot, body.wait_s)
        with self.access.with_caller_ids(body.sandbox_id, caller):
            if body.wait_s:
                await self.access.unless_closing(partial(self._starts.run, request))
            else:
                await self._starts.run(request)
        return self.access.reply(self.access.view(body.sandbox_id, caller), caller)

    async def view(self, body: wire.SandboxFrame, caller: Caller) -> wire.SandboxReply:
        return self.access.reply(self.access.view(body.sandbox_id, caller), caller)

    async def views(self, body: NoBody, caller: Caller) -> wire.SandboxesReply:
        return wire.SandboxesReply(
            [self.access.reply(view, caller) for view in self.access.pool.views(tenant=seen_by(caller))]
        )

    async def snapshot(self, body: wire.SnapshotFrame, caller: Caller) -> CallOutcome:
        sandbox = self.access.find(body.sandbox_id, caller)

        async def run() -> wire.SnapshotReply:
            view = self.access.view(body.sandbox_id, caller)
            return wire.SnapshotReply(await self._snapshots.keep(view.tenant, view.id, sandbox.snapshot))

        return await self.access.run_idempotent(body, caller, run, self.access.max_timeout_s)

    async def snapshots(self, body: NoBody, caller: Caller) -> wire.SnapshotsReply:
        """List the snapshots that the caller may see, oldest first."""
        found = self._snapshots.all(seen_by(caller))
        return wire.SnapshotsReply(
            [wire.KeptReply(one.name, one.tenant, caller.name(one.sandbox_id), one.at_s, one.bytes) for one in found]
        )

    async def remove_snapshot(self, body: wire.KeptFrame, caller: Caller) -> DoneReply:
        """Remove a snapshot. The removal continues if the caller disconnects."""
        with anyio.CancelScope(shield=True):
            await within(_STOP_S, partial(self._snapshots.remove, body.snapshot, seen_by(caller)))
        return DoneReply()

    async def probe(self, body: wire.ProbeFrame, caller: Caller) -> wire.ProbeReply:
        sandbox = self.access.find(body.sandbox_id, caller)
        self.access.check_timeout(body.timeout_s)
        with self.access.with_caller_ids(body.sandbox_id, caller):
            return wire.ProbeReply(await sandbox.probe(body.timeout_s))

    async def wait(self, body: wire.SandboxFrame, caller: Caller) -> wire.WaitReply:
        sandbox = self.access.find(body.sandbox_id, caller)
        cause = None
        with anyio.move_on_after(_WAIT_S):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self.access.cancel_when_closing, tasks.cancel_scope)
                cause = await sandbox.wait()
                tasks.cancel_scope.cancel()
        return wire.WaitReply(cause)

    async def log(self, body: wire.SandboxFrame, caller: Caller) -> wire.LogReply:
        sandbox = self.access.find(body.sandbox_id, caller)
        if not isinstance(sandbox, Logging):
            raise UnsupportedError(f"sandbox {body.sandbox_id} has no log")
        with self.access.with_caller_ids(body.sandbox_id, caller):
            return wire.LogReply(await within(SLACK_S, sandbox.log))

    async def stats(self, body: wire.SandboxFrame, caller: Caller) -> wire.StatsReply:
        sandbox = self.access.find(body.sandbox_id, caller)
        if not isinstance(sandbox, Measured):
            raise UnsupportedError(f"sandbox {body.sandbox_id} does not report its resource usage")
        with self.access.with_caller_ids(body.sandbox_id, caller):
            return wire.StatsReply(dict(await within(SLACK_S, sandbox.stats)))

    async def stop(self, body: wire.SandboxFrame, caller: Caller) -> DoneReply:
        """Stop a sandbox. The stop continues if the caller disconnects."""
        id = caller.key(body.sandbox_id)
        with anyio.CancelScope(shield=True):
            await self._starts.cancel(id, seen_by(caller))
            # If the sandbox belongs to another tenant, `view` raises this error, and the stored calls are not deleted.
            with suppress(SandboxNotFoundError):
                self.access.view(body.sandbox_id, caller)
                self.access.keyed_calls.drop(id)
            with self.access.with_caller_ids(body.sandbox_id, caller):
                await within(_STOP_S, partial(self.access.pool.stop, id, tenant=seen_by(caller)))
        return DoneReply()

    async def cancel(self, body: wire.CancelFrame, caller: Caller) -> DoneReply:
        """Cancel a call with an idempotency key, and return when it has ended."""
        self.access.find(body.sandbox_id, caller)
        await within(SLACK_S, partial(self.access.keyed_calls.cancel, caller.key(body.sandbox_id), body.key))
        return DoneReply()
