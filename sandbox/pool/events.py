"""What a pool tells of its sandboxes: to who listens, to a ledger, to who looks later, and as counts."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

import anyio

from envkit import clock
from envkit.errors import EnvkitError, SandboxEndedError, SandboxRefusedError
from envkit.types import Cause, CauseKind, PoolEvent, SandboxState, SandboxView

from .instance import Instance, ended, is_over
from .metrics import PoolTally

KEPT_EVENTS = 10_000
KEPT_VIEWS = 1_000
KEPT_VIEWS_S = 600.0
ALERT_S = 60.0
"""Seconds from one alert to the next of the same kind about the same sandbox or stock."""
_NEVER_UP = frozenset({SandboxState.STARTING, SandboxState.STOPPED})


class Events:
    """The last 10,000 events, for any number of readers. None of them holds anything up: who is slow misses some, and
    sees it by the numbers.

    Attributes:
        counts: How many there were of each kind.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._ring: list[PoolEvent] = []
        self._last = 0
        self._arrived = anyio.Event()
        self._readers = 0
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
        event = PoolEvent(self._last + 1, clock.wall(), kind, sandbox_id, tenant, text, state, cause)
        if len(self._ring) < KEPT_EVENTS:
            self._ring.append(event)
        else:
            self._ring[self._last % KEPT_EVENTS] = event
        self._last += 1
        self._wake()

    async def since(self, number: int) -> AsyncIterator[PoolEvent]:
        """Give what came after event `number`, as far as it is kept, and what comes, until `close`.

        A number that has not come yet is one of another process, and stands for none.
        """
        number = number if 0 <= number <= self._last else 0
        while True:
            number = max(number, self._last - KEPT_EVENTS)
            if number < self._last:
                yield self._ring[number % KEPT_EVENTS]
                number += 1
            elif self._is_closed:
                return
            else:
                self._readers += 1
                try:
                    await self._arrived.wait()
                finally:
                    self._readers -= 1

    def close(self) -> None:
        """Let readers end after the last event."""
        self._is_closed = True
        self._wake()

    def _wake(self) -> None:
        if self._readers:
            self._arrived.set()
            self._arrived = anyio.Event()


class LedgerStore(Protocol):
    """Where sandboxes are written down, so that they are found again after a restart."""

    @property
    def id(self) -> str:
        """What no other ledger is called, without blanks; the same whenever it is opened."""
        ...

    async def save(self, view: SandboxView) -> None:
        """Write down what a sandbox has become; a later view of the same id takes the place of this one."""
        ...

    def load(self) -> Sequence[SandboxView]:
        """Return what was written down, the newest view of each id."""
        ...


class LedgerWriter:
    """Writes views down one after another, in the order in which they came; of one id only the newest that waits.

    Args:
        ledger: Where to.
        failed: Told of each view that could not be written down, and why.
    """

    def __init__(self, ledger: LedgerStore, failed: Callable[[SandboxView, str], None]) -> None:
        self._ledger = ledger
        self._failed = failed
        self._waiting: dict[str, SandboxView] = {}
        self._unsaved: set[str] = set()
        self._arrived = anyio.Event()
        self._written = anyio.Event()

    def put(self, view: SandboxView) -> None:
        """Have `view` written down soon."""
        self._waiting.pop(view.id, None)  # to its place at the end
        self._waiting[view.id] = view
        self._arrived.set()

    async def saved(self, id: str) -> bool:
        """Wait until nothing of this id waits; say whether the last of it was written down."""
        while id in self._waiting:
            await self._written.wait()
        return id not in self._unsaved

    async def run(self) -> None:
        """Write for ever."""
        while True:
            self._arrived = anyio.Event()
            await self.write()
            await self._arrived.wait()

    async def write(self) -> None:
        """Write all that waits; what is being written when this is cancelled waits on."""
        while self._waiting:
            id, view = next(iter(self._waiting.items()))
            try:
                await self._ledger.save(view)
                self._unsaved.discard(id)
            except (EnvkitError, OSError) as error:
                if not is_over(view.state):
                    self._unsaved.add(id)
                self._failed(view, str(error))
            if self._waiting.get(id) is view:
                del self._waiting[id]
            self._written.set()
            self._written = anyio.Event()


class RecentlyEnded:
    """Views of those that are over: for 10 minutes, and at most 1,000."""

    def __init__(self) -> None:
        self._views: OrderedDict[str, tuple[float, SandboxView]] = OrderedDict()
        self._freed: set[str] = set()

    def add(self, view: SandboxView, *, now: float) -> None:
        self._views[view.id] = (now, view)
        self._views.move_to_end(view.id)
        self._freed.discard(view.id)
        if len(self._views) > KEPT_VIEWS:
            self._drop_oldest()

    def get(self, id: str) -> SandboxView | None:
        found = self._views.get(id)
        return None if found is None else found[1]

    def free(self, id: str, tenant: str | None) -> None:
        """Let the name of one be used again, if it is of this tenant; None is any."""
        if id in self._views and tenant in (None, self._views[id][1].tenant):
            self._freed.add(id)

    def take_name(self, id: str) -> None:
        """Forget the one of this name, if the name is free: it was freed, or nobody ever had what it stood for."""
        found = self.get(id)
        if found is not None and (id in self._freed or {one.state for one in found.phases} <= _NEVER_UP):
            del self._views[id]
            self._freed.discard(id)

    def all(self) -> list[SandboxView]:
        return [view for _, view in self._views.values()]

    def forget(self, *, now: float) -> None:
        """Forget what is older than it may be."""
        while self._views and now - next(iter(self._views.values()))[0] >= KEPT_VIEWS_S:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        id, _ = self._views.popitem(last=False)
        self._freed.discard(id)


class EventLog:
    """Takes down what happens to the sandboxes of one pool.

    Args:
        ledger: Where they are written down as well; None for nowhere.

    Attributes:
        events: What happened.
        past: Those that are over.
        tally: How much of what has happened.
        saver: Writes to the ledger.
    """

    def __init__(self, ledger: LedgerStore | None) -> None:
        self.events = Events()
        self.past = RecentlyEnded()
        self.tally = PoolTally()
        self.saver = None if ledger is None else LedgerWriter(ledger, self._unsaved)
        self._alerted: dict[tuple[object, str], float] = {}

    def entered(self, member: Instance) -> None:
        """A sandbox is in another state."""
        self._told(member.record())
        if member.state is SandboxState.STARTING:
            self.tally.starts += 1
        elif member.state is SandboxState.LOST:
            # What runs the commands of the pool's owner, such as environment servers, never exits if all is well.
            self.tally.over(member.ended_by().kind, may_exit=bool(member.spec.command) and member.payer is not None)
        elif member.has_failed and not isinstance(member.failure, (SandboxRefusedError, SandboxEndedError)):
            self.tally.failed_starts += 1

    def left(self, member: Instance) -> None:
        """Nothing is left of a sandbox."""
        if not member.is_forgotten:
            self.past.add(member.record(), now=clock.now())

    def renamed(self, before: SandboxView, name: str) -> None:
        """A spare has become what `name` stands for."""
        self._told(ended(before, Cause(CauseKind.STOPPED, f"lent as {name}")))

    def ended(self, view: SandboxView) -> None:
        """What another process had left is over."""
        self._told(view)
        self.past.add(view, now=clock.now())

    def alert(self, kind: str, member: Instance | None, text: str, *, about: object = "") -> None:
        """Something is to be looked at: with a sandbox, or with something else, which `about` is."""
        sandbox_id, tenant = ("", "") if member is None else (member.id, member.tenant)
        now = clock.now()
        subject = (sandbox_id or about, kind)
        if now - self._alerted.get(subject, -ALERT_S) >= ALERT_S:
            self._alerted[subject] = now
            self.events.emit(kind, text, sandbox_id=sandbox_id, tenant=tenant)

    def forget(self) -> None:
        """Forget what need not be known any longer."""
        now = clock.now()
        self.past.forget(now=now)
        self._alerted = {about: at for about, at in self._alerted.items() if now - at < ALERT_S}

    def _told(self, view: SandboxView) -> None:
        last = view.phases[-1]
        self.events.emit(
            "state", last.reason, sandbox_id=view.id, tenant=view.tenant, state=last.state, cause=last.cause
        )
        if self.saver is not None:
            self.saver.put(view)

    def _unsaved(self, view: SandboxView, why: str) -> None:
        self.events.emit("ledger", f"it was not written down: {why}", sandbox_id=view.id, tenant=view.tenant)
