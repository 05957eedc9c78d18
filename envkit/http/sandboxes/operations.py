"""What can be asked of a server about sandboxes: the calls by name, whatever they came over.

What a call asks for has a bound in seconds, so that none hangs, whatever its sandbox does.
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
from envkit.http.limits.memory_budget import Reservation
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
"""What the methods of frames begin with."""

_MAX_SPEC_BYTES = 128 << 10
"""What a sandbox was to be is remembered for a while after its end."""

_STOP_S = 60.0
_WAIT_S = 25.0

Call: TypeAlias = Callable[[Any, Caller, Reservation], Awaitable[CallOutcome]]


@runtime_checkable
class Logging(Protocol):
    """A sandbox that keeps what its command writes to standard error."""

    async def log(self) -> str: ...


@runtime_checkable
class Measured(Protocol):
    """A sandbox that knows what it uses of the machine."""

    async def stats(self) -> Mapping[str, JSON]: ...


class SandboxOperations:
    """The calls about sandboxes of protocol version 1.

    Args:
        pool: Lends them.
        problem: Returns what a caller is told about an error.
        max_timeout_s: The longest that a command may ask for, seconds.
        ttl_s: Seconds without use after which a sandbox is stopped, where its caller does not ask for less.
        permits: What callers may have their sandboxes be.
        snapshots: How many snapshots there may be.

    Attributes:
        access: How calls come to sandboxes.
        work: The calls that do something in one.
    """

    def __init__(
        self,
        pool: SandboxPool,
        problem: Callable[[Exception], Problem],
        *,
        max_timeout_s: float = MAX_TIMEOUT_S,
        ttl_s: float | None = None,
        permits: SandboxPolicy | None = None,
        snapshots: SnapshotBounds | None = None,
    ) -> None:
        self.access = SandboxLookup(pool, problem, max_timeout_s=max_timeout_s)
        self.work = work = SandboxWork(self.access)
        self._permits = permits or SandboxPolicy()
        self._starts = PendingStarts(pool, self.access.repeats.drop, ttl_s=ttl_s)
        self._snapshots = Snapshots(pool, snapshots or SnapshotBounds())
        self._methods: Mapping[str, tuple[msgspec.json.Decoder[Any], Call]] = {
            "create": (msgspec.json.Decoder(wire.CreateFrame), self._plain(self.create)),
            "view": (msgspec.json.Decoder(wire.SandboxFrame), self._plain(self.view)),
            "list": (msgspec.json.Decoder(NoBody), self._plain(self.views)),
            "exec": (msgspec.json.Decoder(wire.ExecFrame), work.exec),
            "shell": (msgspec.json.Decoder(wire.ShellFrame), work.shell),
            "close_shell": (msgspec.json.Decoder(wire.CloseShellFrame), self._plain(work.close_shell)),
            "read": (msgspec.json.Decoder(wire.ReadFrame), work.read),
            "write": (msgspec.json.Decoder(wire.WriteFrame), work.write),
            "snapshot": (msgspec.json.Decoder(wire.SnapshotFrame), self.snapshot),
            "snapshots": (msgspec.json.Decoder(NoBody), self._plain(self.snapshots)),
            "remove_snapshot": (msgspec.json.Decoder(wire.KeptFrame), self._plain(self.remove_snapshot)),
            "probe": (msgspec.json.Decoder(wire.ProbeFrame), self._plain(self.probe)),
            "wait": (msgspec.json.Decoder(wire.SandboxFrame), self._plain(self.wait)),
            "log": (msgspec.json.Decoder(wire.SandboxFrame), self._plain(self.log)),
            "stats": (msgspec.json.Decoder(wire.SandboxFrame), self._plain(self.stats)),
            "stop": (msgspec.json.Decoder(wire.SandboxFrame), self._plain(self.stop)),
            "cancel": (msgspec.json.Decoder(wire.CancelFrame), self._plain(self.cancel)),
        }

    def live(self, tasks: TaskGroup) -> None:
        """Have what outlives its caller done in `tasks`."""
        self.access.repeats.tasks = self._starts.tasks = tasks

    async def answer(self, frame: Frame, caller: Caller, used: set[str], room: Reservation) -> CallOutcome:
        """Answer a frame; an error is an answer too.

        Args:
            frame: What is asked for.
            caller: Who asks.
            used: The sandbox that is used, if one is, is added to it.
            room: Where the answer is counted, beside what a frame's parameters take.
        """
        name = frame.method.removeprefix(PREFIX)
        try:
            if name not in self._methods:
                hint = did_you_mean(frame.method, [f"{PREFIX}{one}" for one in self._methods])
                raise RequestError(f"there is no method {frame.method[:100]!r}{hint}")
            decoder, call = self._methods[name]
            body = read(frame.params, decoder)
        except EnvkitError as error:
            return self.access.failure(error)
        if name == "stop":
            used.discard(body.sandbox_id)
        elif name not in ("list", "view", "snapshots", "remove_snapshot"):
            used.add(body.sandbox_id)
        return await self.access.attempt(partial(call, body, caller, room))

    def keep(self, used: set[str], caller: Caller) -> None:
        """Renew the leases of the sandboxes named in `used`; the names of those that are over are taken out."""
        for id in list(used):
            if caller.key(id) not in self._starts:
                try:
                    self.access.pool.get(caller.key(id), tenant=seen_by(caller))
                except EnvkitError:
                    used.discard(id)

    async def create(self, body: wire.CreateFrame, caller: Caller) -> wire.SandboxReply:
        """Lend a sandbox; a caller that goes away meanwhile leaves that alone."""
        self.access.refuse_when_closing()
        snapshot = None if body.snapshot is None else self._snapshots.known(body.snapshot, seen_by(caller))
        if len(write(body)) > _MAX_SPEC_BYTES:
            raise TooLargeError(
                f"what a sandbox is to be may have {_MAX_SPEC_BYTES} bytes; write files into it instead"
            )
        spec = body.spec()
        if (why := why_no_network(spec.network)) is not None:
            raise OptionError("network", why)
        self._permits.require(spec, caller)
        order = StartRequest(caller.key(body.sandbox_id), spec, caller.tenant, body.lease_s, snapshot, body.wait_s)
        with self.access.naming(body.sandbox_id, caller):
            if body.wait_s:
                await self.access.unless_closing(partial(self._starts.run, order))
            else:
                await self._starts.run(order)
        return self.access.seen(self.access.view(body.sandbox_id, caller), caller)

    async def view(self, body: wire.SandboxFrame, caller: Caller) -> wire.SandboxReply:
        return self.access.seen(self.access.view(body.sandbox_id, caller), caller)

    async def views(self, body: NoBody, caller: Caller) -> wire.SandboxesReply:
        return wire.SandboxesReply(
            [self.access.seen(view, caller) for view in self.access.pool.views(tenant=seen_by(caller))]
        )

    async def snapshot(self, body: wire.SnapshotFrame, caller: Caller, room: Reservation) -> CallOutcome:
        sandbox = self.access.find(body.sandbox_id, caller)

        async def run() -> wire.SnapshotReply:
            view = self.access.view(body.sandbox_id, caller)
            return wire.SnapshotReply(await self._snapshots.keep(view.tenant, view.id, sandbox.snapshot))

        return await self.access.once(body, caller, run, self.access.max_timeout_s, room)

    async def snapshots(self, body: NoBody, caller: Caller) -> wire.SnapshotsReply:
        """List the snapshots that the caller sees, oldest first."""
        found = self._snapshots.all(seen_by(caller))
        return wire.SnapshotsReply(
            [wire.KeptReply(one.name, one.tenant, caller.name(one.sandbox_id), one.at_s, one.bytes) for one in found]
        )

    async def remove_snapshot(self, body: wire.KeptFrame, caller: Caller) -> DoneReply:
        """Remove a snapshot; goes on when the caller goes away."""
        with anyio.CancelScope(shield=True):
            await within(_STOP_S, partial(self._snapshots.remove, body.snapshot, seen_by(caller)))
        return DoneReply()

    async def probe(self, body: wire.ProbeFrame, caller: Caller) -> wire.ProbeReply:
        sandbox = self.access.find(body.sandbox_id, caller)
        self.access.check_timeout(body.timeout_s)
        with self.access.naming(body.sandbox_id, caller):
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
            raise UnsupportedError(f"sandbox {body.sandbox_id} keeps no log")
        with self.access.naming(body.sandbox_id, caller):
            return wire.LogReply(await within(SLACK_S, sandbox.log))

    async def stats(self, body: wire.SandboxFrame, caller: Caller) -> wire.StatsReply:
        sandbox = self.access.find(body.sandbox_id, caller)
        if not isinstance(sandbox, Measured):
            raise UnsupportedError(f"sandbox {body.sandbox_id} does not say what it uses")
        with self.access.naming(body.sandbox_id, caller):
            return wire.StatsReply(dict(await within(SLACK_S, sandbox.stats)))

    async def stop(self, body: wire.SandboxFrame, caller: Caller) -> DoneReply:
        """End a sandbox; goes on when the caller goes away."""
        id = caller.key(body.sandbox_id)
        with anyio.CancelScope(shield=True):
            await self._starts.cancel(id, seen_by(caller))
            with suppress(SandboxNotFoundError):  # it may be another's, and so may be what was called
                self.access.view(body.sandbox_id, caller)
                self.access.repeats.drop(id)
            with self.access.naming(body.sandbox_id, caller):
                await within(_STOP_S, partial(self.access.pool.stop, id, tenant=seen_by(caller)))
        return DoneReply()

    async def cancel(self, body: wire.CancelFrame, caller: Caller) -> DoneReply:
        """End a call that has a key, and return once that is done."""
        self.access.find(body.sandbox_id, caller)
        await within(SLACK_S, partial(self.access.repeats.cancel, caller.key(body.sandbox_id), body.key))
        return DoneReply()

    def _plain(self, method: Callable[[Any, Caller], Awaitable[object]]) -> Call:
        return lambda body, caller, room: self.access.outcome(partial(method, body, caller))
