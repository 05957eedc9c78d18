"""Event log of a pool: emits events, writes sandboxes to the ledger, and stores views of ended sandboxes."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import anyio

from envkit import clock
from envkit.errors import EnvkitError, SandboxEndedError, SandboxRefusedError
from envkit.types import Cause, CauseKind, PoolEvent, SandboxState, SandboxView, TenantKey

from .instance import Instance, ended, is_over

KEPT_EVENTS = 10_000
KEPT_VIEWS = 1_000
KEPT_VIEWS_S = 600.0
ALERT_S = 60.0
"""Minimum seconds between two alerts of the same kind about the same sandbox or stock."""
_NEVER_UP = frozenset({SandboxState.STARTING, SandboxState.STOPPED})


class Events:
    """The last 10,000 events, for any number of readers.

    A slow reader does not block the pool. It misses events, which it can detect by the gap in the event numbers.

    Attributes:
        counts: Number of events by kind.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._kept: deque[PoolEvent] = deque(maxlen=KEPT_EVENTS)
        self._last = 0
        self._arrived = anyio.Event()
        self._is_closed = False

    def emit(
        self,
        kind: str,
        text: str,
        *,
        sandbox_id: str = "",
        tenant: str = "",
        state: SandboxState | None = None,
        cause: Cause | None = None,
    ) -> None:
        self.counts[kind] += 1
        self._last += 1
        self._kept.append(PoolEvent(self._last, clock.wall(), kind, sandbox_id, tenant, text, state, cause))
        self._wake()

    async def since(self, number: int) -> AsyncIterator[PoolEvent]:
        """Yield the stored events after event `number`, then new events until `close`.

        A `number` above that of the last event comes from an earlier process; all stored events are then yielded.
        """
        number = number if 0 <= number <= self._last else 0
        while True:
            number = max(number, self._last - len(self._kept))
            if number < self._last:
                yield self._kept[number - self._last]
                number += 1
            elif self._is_closed:
                return
            else:
                await self._arrived.wait()

    def close(self) -> None:
        """End the iteration of all readers after the last event."""
        self._is_closed = True
        self._wake()

    def _wake(self) -> None:
        self._arrived.set()
        self._arrived = anyio.Event()


class LedgerStore(Protocol):
    """Persistent store that records a pool's sandboxes, so that after a restart a pool can re-attach to them."""

    @property
    def id(self) -> str:
        """Unique id of this store. It contains no spaces, and stays the same after a restart."""
        ...

    async def save(self, view: SandboxView) -> None:
        """Persist a view. It replaces the previous view of the same tenant and id."""
        ...

    def load(self) -> Sequence[SandboxView]:
        """Return the newest persisted view of each tenant and id."""
        ...


class LedgerWriter:
    """Writes views to a ledger one at a time, in order. Of the queued views of a sandbox, it writes only the newest."""

    def __init__(self, ledger: LedgerStore, failed: Callable[[SandboxView, str], None]) -> None:
        self._ledger = ledger
        self._failed = failed
        self._waiting: dict[TenantKey, SandboxView] = {}
        self._unsaved: set[TenantKey] = set()
        self._arrived = anyio.Event()
        self._written = anyio.Event()

    def put(self, view: SandboxView) -> None:
        """Queue `view` for writing."""
        self._waiting.pop(view.key, None)  # Move the sandbox to the end of the queue.
        self._waiting[view.key] = view
        self._arrived.set()

    async def saved(self, key: TenantKey) -> bool:
        """Wait until no view of the sandbox `key` is pending; return whether its last view was persisted."""
        while key in self._waiting:
            await self._written.wait()
        return key not in self._unsaved

    async def run(self) -> None:
        """Write pending views until cancelled."""
        while True:
            self._arrived = anyio.Event()
            await self.write()
            await self._arrived.wait()

    async def write(self) -> None:
        """Write all pending views; if cancelled, the view that is being written stays pending."""
        while self._waiting:
            key, view = next(iter(self._waiting.items()))
            try:
                await self._ledger.save(view)
                self._unsaved.discard(key)
            except (EnvkitError, OSError) as error:
                if not is_over(view.state):
                    self._unsaved.add(key)
                self._failed(view, str(error))
            if self._waiting.get(key) is view:
                del self._waiting[key]
            self._written.set()
            self._written = anyio.Event()


class RecentlyEnded:
    """Stores the views of the last 1,000 ended sandboxes for at most 10 minutes."""

    def __init__(self) -> None:
        self._views: OrderedDict[TenantKey, tuple[float, SandboxView]] = OrderedDict()
        self._freed: set[TenantKey] = set()

    def add(self, view: SandboxView, *, now: float) -> None:
        self._views[view.key] = (now, view)
        self._views.move_to_end(view.key)
        self._freed.discard(view.key)
        if len(self._views) > KEPT_VIEWS:
            self._views.popitem(last=False)

    def get(self, key: TenantKey) -> SandboxView | None:
        found = self._views.get(key)
        return None if found is None else found[1]

    def free(self, key: TenantKey) -> None:
        """Allow a new sandbox to have the same tenant and id as the ended sandbox `key`."""
        if key in self._views:
            self._freed.add(key)

    def take_key(self, key: TenantKey) -> None:
        """Drop the view of `key` if a new sandbox may use it: after `free`, or if the old sandbox was never ready."""
        view = self.get(key)
        if view is not None and (key in self._freed or {phase.state for phase in view.phases} <= _NEVER_UP):
            del self._views[key]
            self._freed.discard(key)

    def all(self) -> list[SandboxView]:
        return [view for _, view in self._views.values()]

    def forget(self, *, now: float) -> None:
        """Drop expired views."""
        while self._views and now - next(iter(self._views.values()))[0] >= KEPT_VIEWS_S:
            self._views.popitem(last=False)
        self._freed &= self._views.keys()


@dataclass(slots=True)
class PoolTally:
    """Totals since a pool was opened.

    Attributes:
        starts: Number of starts.
        failed_starts: Number of failed starts, except those that failed because of the sandbox's spec.
        restarts: Number of warm sandboxes that were replaced because their start failed or they were lost.
        finished: Number of tenants' sandboxes that ended because their command exited.
        losses: Number of lost sandboxes by kind of cause.
    """

    starts: int = 0
    failed_starts: int = 0
    restarts: int = 0
    finished: int = 0
    losses: dict[CauseKind, int] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class PoolCounts(PoolTally):
    """Numbers of a pool's current sandboxes and requests, and its totals.

    Attributes:
        states: Number of live sandboxes by state.
        warm: Number of warm sandboxes that are ready.
        waiting: Number of waiting requests by tenant.
        alerts: Total number of alerts by kind.
        probe_s: Duration of the last probe in seconds, by sandbox.
    """

    states: Mapping[SandboxState, int]
    warm: int
    waiting: Mapping[str, int]
    alerts: Mapping[str, int]
    probe_s: Mapping[TenantKey, float]


class EventLog:
    """Records what happens to the sandboxes of one pool."""

    def __init__(self, ledger: LedgerStore | None) -> None:
        self.events = Events()
        self.past = RecentlyEnded()
        self.tally = PoolTally()
        self.ledger_writer = None if ledger is None else LedgerWriter(ledger, self._unsaved)
        self._alerted: dict[tuple[object, str], float] = {}

    def entered(self, instance: Instance) -> None:
        """Record that a sandbox changed its state."""
        self._record(instance.record())
        if instance.state is SandboxState.STARTING:
            self.tally.starts += 1
        elif instance.state is SandboxState.LOST:
            # Only tenants' commands are expected to exit. The pool's own process runs servers, which should not exit.
            kind, may_exit = instance.ended_by().kind, bool(instance.spec.command) and not instance.is_own
            if may_exit and kind is CauseKind.EXITED:
                self.tally.finished += 1
            else:
                self.tally.losses[kind] = self.tally.losses.get(kind, 0) + 1
        elif instance.has_failed and not isinstance(instance.failure, (SandboxRefusedError, SandboxEndedError)):
            self.tally.failed_starts += 1

    def left(self, instance: Instance) -> None:
        """Record that a sandbox has been fully removed."""
        if not instance.is_forgotten:
            self.past.add(instance.record(), now=clock.now())

    def renamed(self, before: SandboxView, name: str) -> None:
        """Record that a warm sandbox was leased and got the id `name`, a tenant or both; `before` is its last view.

        If the id is new, an event reports the end of the old id.
        """
        view = ended(before, Cause(CauseKind.STOPPED, f"leased as {name}"))
        if name != before.id:
            self._record(view)
        elif self.ledger_writer is not None:
            self.ledger_writer.put(view)

    def ended(self, view: SandboxView) -> None:
        """Record that a sandbox of a previous process has ended."""
        self._record(view)
        self.past.add(view, now=clock.now())

    def alert(self, kind: str, instance: Instance | None, text: str, *, about: object = "") -> None:
        """Emit an alert about `instance` or, if it is None, `about`; at most one a minute for each subject and kind."""
        tenant, sandbox_id = ("", "") if instance is None else instance.key
        now = clock.now()
        subject = (about if instance is None else instance.key, kind)
        if now - self._alerted.get(subject, -ALERT_S) >= ALERT_S:
            self._alerted[subject] = now
            self.events.emit(kind, text, sandbox_id=sandbox_id, tenant=tenant)

    def forget(self) -> None:
        """Drop expired views, and the times of alerts older than a minute."""
        now = clock.now()
        self.past.forget(now=now)
        self._alerted = {about: at for about, at in self._alerted.items() if now - at < ALERT_S}

    def _record(self, view: SandboxView) -> None:
        last = view.phases[-1]
        self.events.emit(
            "state", last.reason, sandbox_id=view.id, tenant=view.tenant, state=last.state, cause=last.cause
        )
        if self.ledger_writer is not None:
            self.ledger_writer.put(view)

    def _unsaved(self, view: SandboxView, why: str) -> None:
        self.events.emit("ledger", f"sandbox not persisted: {why}", sandbox_id=view.id, tenant=view.tenant)
