"""The operations on whole sandboxes and snapshots. Each has a timeout, so that a call ends even if its sandbox hangs.

Starts outlive their calls: a caller that repeats its request waits for the same start.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import anyio
from anyio.abc import TaskGroup

from envkit import clock
from envkit.errors import EnvkitError, OptionError, SandboxNotFoundError, TooLargeError, UnreachableError
from envkit.http.auth.caller import Caller
from envkit.http.auth.sandbox_policy import SandboxPolicy
from envkit.http.protocol import operations as table
from envkit.http.protocol import sandbox_messages as wire
from envkit.http.protocol.asgi import handles
from envkit.http.protocol.messages import DoneReply, NoBody, write
from envkit.http.sandboxes.access import MAX_TIMEOUT_S, SLACK_S, SandboxAccess, within
from envkit.http.sandboxes.idempotency import IdempotentCalls
from envkit.protocols import SandboxPool
from envkit.types import SandboxSpec, TenantKey, why_no_network
from envkit.types.sandboxes import Blocked

_MAX_SPEC_BYTES = 128 << 10
"""Limit on the size of a sandbox's spec. The server stores specs for a while after their sandboxes have ended."""

_RESULT_TTL_S = 600.0

MAX_WAITING = 256
"""Maximum number of a tenant's starts that wait for capacity. Without capacity, further starts fail immediately."""

_STOP_S = 60.0
_WAIT_S = 25.0


class SandboxLifecycle:
    """The operations on whole sandboxes and snapshots. `ttl_s` and `policy` are arguments of `create_app`.

    Attributes:
        starts: The starts of sandboxes that are in progress.
    """

    def __init__(
        self,
        access: SandboxAccess,
        keyed: IdempotentCalls,
        *,
        ttl_s: float | None = None,
        policy: SandboxPolicy | None = None,
    ) -> None:
        self.access = access
        self._policy = policy or SandboxPolicy()
        self._keyed = keyed
        self.starts = PendingStarts(access.pool, keyed.drop, ttl_s=ttl_s)
        self._snapshots: dict[str, _Snapshot] = {}
        """The snapshots by the random names that callers use: those of sandbox backends can be guessed."""

    def keep(self, used: set[str], caller: Caller) -> None:
        """Renew the leases of the sandboxes with the ids `used`; remove the ids of ended sandboxes from `used`."""
        for id in list(used):
            key = caller.key(id)
            if key not in self.starts:
                try:
                    self.access.pool.get(key.id, tenant=key.tenant)
                except EnvkitError:
                    used.discard(id)

    @handles(table.CREATE_SANDBOX)
    async def create(self, body: wire.CreateFrame, caller: Caller) -> wire.SandboxReply:
        """Start a sandbox from a spec and return its state. The call is safe to repeat.

        If `snapshot` is set, the sandbox contains the files of that snapshot at its start. Status 202 means that the
        start is still in progress: repeat the call until it returns the sandbox. Status 409 means that the id belongs
        to a sandbox with another spec, or to a sandbox that has ended. The id of an ended sandbox can be used again
        after a `DELETE`, or ten minutes after the end.
        """
        self.access.refuse_when_closing()
        snapshot = None
        if body.snapshot is not None:
            if (found := self._snapshot(body.snapshot, caller)) is None:
                raise SandboxNotFoundError(f"no snapshot {body.snapshot[:200]!r}")
            snapshot = found.pool_id
        if len(write(body)) > _MAX_SPEC_BYTES:
            raise TooLargeError(
                f"the spec of a sandbox exceeds {_MAX_SPEC_BYTES} bytes; write large contents into files of the sandbox"
            )
        spec = body.spec()
        if (why := why_no_network(spec.network)) is not None:
            raise OptionError("network", why)
        self._policy.require(spec, caller)
        request = StartRequest(caller.key(body.sandbox_id), spec, body.lease_s, snapshot, body.wait_s)
        if body.wait_s:
            await self.access.unless_closing(partial(self.starts.run, request))
        else:
            await self.starts.run(request)
        return self.access.reply(self.access.view(body.sandbox_id, caller), caller)

    @handles(table.VIEW)
    async def view(self, body: wire.SandboxFrame, caller: Caller) -> wire.SandboxReply:
        """Return the state of a sandbox without renewing its lease. Ended sandboxes stay visible for ten minutes."""
        return self.access.reply(self.access.view(body.sandbox_id, caller), caller)

    @handles(table.VIEWS)
    async def views(self, body: NoBody, caller: Caller) -> wire.SandboxesReply:
        """List all sandboxes that the caller may see, oldest first."""
        views = self.access.pool.views(tenant=caller.visible_tenant)
        return wire.SandboxesReply([self.access.reply(view, caller) for view in views])

    @handles(table.SNAPSHOT)
    async def snapshot(self, body: wire.SnapshotFrame, caller: Caller) -> wire.SnapshotReply:
        """Take a snapshot of the files of a sandbox. New sandboxes can start from the snapshot."""
        sandbox = self.access.find(body.sandbox_id, caller)
        key = self.access.view(body.sandbox_id, caller).key

        async def keep() -> str:
            pool_id, name = await sandbox.snapshot(), f"snapshot-{secrets.token_hex(16)}"
            size = await self.access.pool.snapshot_bytes(pool_id)
            self._snapshots[name] = _Snapshot(key, clock.wall(), size, pool_id)
            return name

        return wire.SnapshotReply(await within(MAX_TIMEOUT_S, keep))

    @handles(table.LIST_SNAPSHOTS)
    async def snapshots(self, body: NoBody, caller: Caller) -> wire.SnapshotsReply:
        """List all snapshots that the caller may see, with their sizes, oldest first."""
        found = [(name, one) for name, one in self._snapshots.items() if self._snapshot(name, caller) is not None]
        return wire.SnapshotsReply(
            [wire.KeptReply(name, one.key.tenant, caller.name(one.key), one.at_s, one.bytes) for name, one in found]
        )

    @handles(table.REMOVE_SNAPSHOT)
    async def remove_snapshot(self, body: wire.KeptFrame, caller: Caller) -> DoneReply:
        """Remove a snapshot. The call is safe to repeat, and succeeds if the snapshot does not exist."""
        if (found := self._snapshot(body.snapshot, caller)) is not None:
            # As in `stop`, the removal continues if the caller disconnects.
            with anyio.CancelScope(shield=True):
                await within(_STOP_S, partial(self.access.pool.remove_snapshot, found.pool_id))
                self._snapshots.pop(body.snapshot, None)
        return DoneReply()

    def _snapshot(self, name: str, caller: Caller) -> _Snapshot | None:
        """Return the snapshot with this name; None if the caller may not use it."""
        found = self._snapshots.get(name)
        return found if found is not None and caller.visible_tenant in (None, found.key.tenant) else None

    @handles(table.PROBE)
    async def probe(self, body: wire.ProbeFrame, caller: Caller) -> wire.ProbeReply:
        """Send a probe to a sandbox, and return the seconds until the sandbox answered."""
        sandbox = self.access.find(body.sandbox_id, caller)
        self.access.check_timeout(body.timeout_s)
        return wire.ProbeReply(await sandbox.probe(body.timeout_s))

    @handles(table.WAIT)
    async def wait(self, body: wire.SandboxFrame, caller: Caller) -> wire.WaitReply:
        """Wait up to 25 s for the end of a sandbox. Return the cause of its end, or null if it still runs."""
        sandbox = self.access.find(body.sandbox_id, caller)
        cause = None
        with anyio.move_on_after(_WAIT_S):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self.access.cancel_when_closing, tasks.cancel_scope)
                cause = await sandbox.wait()
                tasks.cancel_scope.cancel()
        return wire.WaitReply(cause)

    @handles(table.DIAGNOSE)
    async def diagnose(self, body: wire.SandboxFrame, caller: Caller) -> wire.DiagnoseReply:
        """Return why a sandbox does not answer."""
        sandbox = self.access.find(body.sandbox_id, caller)
        found = getattr(sandbox, "diagnose", None)
        return wire.DiagnoseReply(Blocked.UNKNOWN if found is None else await within(SLACK_S, found))

    @handles(table.LOG)
    async def log(self, body: wire.SandboxFrame, caller: Caller) -> wire.LogReply:
        """Return the last 64 KiB that the command of a sandbox wrote to standard error."""
        sandbox = self.access.find(body.sandbox_id, caller)
        return wire.LogReply(await within(SLACK_S, sandbox.log))

    @handles(table.STATS)
    async def stats(self, body: wire.SandboxFrame, caller: Caller) -> wire.StatsReply:
        """Return the resource usage of a sandbox."""
        sandbox = self.access.find(body.sandbox_id, caller)
        return wire.StatsReply(dict(await within(SLACK_S, sandbox.stats)))

    @handles(table.STOP)
    async def stop(self, body: wire.SandboxFrame, caller: Caller) -> DoneReply:
        """Stop a sandbox and delete its files. The call is safe to repeat, and succeeds if the sandbox does not exist.

        Afterwards, `PUT` can start a new sandbox with the same id.
        """
        key = self.access.usable_key(body.sandbox_id, caller)
        with anyio.CancelScope(shield=True):
            await self.starts.cancel(key)
            self._keyed.drop(key)
            await within(_STOP_S, partial(self.access.pool.stop, key.id, tenant=key.tenant))
        return DoneReply()

    @handles(table.CANCEL)
    async def cancel(self, body: wire.CancelFrame, caller: Caller) -> DoneReply:
        """Cancel the call with this idempotency key, and return when that call has ended."""
        self.access.find(body.sandbox_id, caller)
        await within(SLACK_S, partial(self._keyed.cancel, caller.key(body.sandbox_id), body.cancelled))
        return DoneReply()


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """A snapshot of the sandbox `key`, whose tenant owns it. The server never removes it on its own.

    It was taken `at_s` seconds after 1970, and its name in the sandbox pool is `pool_id`.
    """

    key: TenantKey
    at_s: float
    bytes: int
    pool_id: str


@dataclass(frozen=True, slots=True)
class StartRequest:
    """A request to start a sandbox; see `envkit.protocols.SandboxPool.create`."""

    key: TenantKey
    spec: SandboxSpec
    ttl_s: float | None
    snapshot: str | None
    wait_s: float = field(default=0.0, compare=False)


@dataclass(slots=True)
class _PendingStart:
    request: StartRequest
    done: anyio.Event = field(default_factory=anyio.Event)
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    error: Exception | None = None
    ended_at: float = 0.0


class PendingStarts:
    """Starts sandboxes. A caller can disconnect during a start and repeat its request later.

    `on_new` is called with the key of a sandbox before it starts, unless the pool already knows the key. `ttl_s` is the
    maximum of the seconds without use after which a sandbox is stopped; None for no maximum.
    """

    def __init__(self, pool: SandboxPool, on_new: Callable[[TenantKey], None], *, ttl_s: float | None = None) -> None:
        self.tasks: TaskGroup | None = None
        """Runs the starts, which outlive their callers; None while the server is not running."""
        self.is_draining = False
        """Whether new sandboxes are refused, because the server will shut down."""
        self._pool = pool
        self._on_new = on_new
        self._ttl_s = ttl_s
        self._starts: dict[TenantKey, _PendingStart] = {}
        self._in_progress: Counter[str] = Counter()

    def __contains__(self, key: TenantKey) -> bool:
        """Return whether the start of a sandbox with this key is in progress."""
        start = self._starts.get(key)
        return start is not None and not start.done.is_set()

    async def run(self, request: StartRequest) -> None:
        """Start a sandbox. If the same request is already in progress, wait for that start instead.

        If the start fails, all callers that wait for it get the error. If no caller waits, the next call with the same
        request gets the error. The errors are those of `SandboxPool.create`.
        """
        start = self._starts.get(request.key)
        # If a different request has the same key, begin this one too, so that the pool rejects it.
        if start is None or start.request != request:
            start = self._begin(request)
        await start.done.wait()
        if self._starts.get(request.key) is start:
            del self._starts[request.key]
        if start.error is not None:
            raise start.error.with_traceback(None)

    async def cancel(self, key: TenantKey) -> None:
        """Cancel the start of a sandbox, if one is in progress."""
        if (start := self._starts.get(key)) is not None:
            start.scope.cancel()
            await start.done.wait()
            self._starts.pop(key, None)

    def _begin(self, request: StartRequest) -> _PendingStart:
        try:
            self._pool.view(request.key.id, tenant=request.key.tenant)
        except SandboxNotFoundError:
            if self.is_draining:
                raise UnreachableError("the server is shutting down and starts no sandboxes; retry later") from None
            self._on_new(request.key)
        expired_s = clock.now() - _RESULT_TTL_S
        for key, one in list(self._starts.items()):
            if one.done.is_set() and one.ended_at < expired_s:
                del self._starts[key]
        start = _PendingStart(request)
        self._starts.setdefault(request.key, start)
        assert self.tasks is not None
        self.tasks.start_soon(self._run, start)
        return start

    async def _run(self, start: _PendingStart) -> None:
        new, (tenant, id) = start.request, start.request.key
        wait_s = new.wait_s if new.wait_s and self._in_progress[tenant] < MAX_WAITING else None
        self._in_progress[tenant] += 1
        start.error = SandboxNotFoundError(f"sandbox {id} was stopped during its start")
        try:
            with start.scope:
                ttl_s = min((one for one in (new.ttl_s, self._ttl_s) if one is not None), default=None)
                await self._pool.create(id, new.spec, tenant=tenant, ttl_s=ttl_s, snapshot=new.snapshot, wait_s=wait_s)
                start.error = None
        except Exception as error:
            start.error = error
        finally:
            self._in_progress -= Counter({tenant: 1})
            start.ended_at = clock.now()
            start.done.set()
