"""The fleet itself: who gets a place in which box, and what fills the places."""

from __future__ import annotations

import math
import uuid
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Self, TypeAlias

import anyio

from envkit import clock
from envkit.errors import CapacityError, EnvkitError, SandboxError, SandboxLostError, SandboxStartError
from envkit.fleet.env_worker import EnvSandbox, EnvWorker, WorkerClient, WorkerEvent, WorkerLease, stop
from envkit.fleet.episode import REBUILDS, EpisodeTally, FleetEpisode
from envkit.fleet.session_store import SessionRecord, SessionStore
from envkit.fleet.suspect_queue import SuspectQueue
from envkit.fleet.worker_health import HeartbeatTimes, watch_server
from envkit.restarts import Failures, RestartBudget
from envkit.types import Cause, CauseKind, SandboxState, Task

StartBox: TypeAlias = Callable[[], Awaitable[EnvSandbox]]
ConnectBox: TypeAlias = Callable[[EnvSandbox], AbstractAsyncContextManager[WorkerClient]]

_RETRY_S = 0.02
"""Seconds between two attempts to reach a server that does not listen yet."""
_ROOM_S = 1.0
"""Seconds until room is asked for again where there was none."""


class FleetHost:
    """Plays episodes in boxes; satisfies `envkit.protocols.EnvHost`. Used as ``async with``.

    Entering waits until every box has been tried once; leaving stops them all.

    Args:
        start_box: Starts a sandbox with an env server in it.
        connect: Opens a client of the server in a sandbox; may raise `UnreachableError` while that does not listen yet.
        boxes: Number of boxes.
        slots_per_sandbox: Episodes that one box plays at once.
        restarts: How often a box may be replaced: each of them, or with `unenforced` all of them together. A box that
            did not start for want of room waits until there is some, which does not count.
        unenforced: Whether a box that is lost stays lost when the budget is spent, so that a run ends; otherwise it is
            replaced when the budget allows it again.
        alert: Told, in one line, of each box that has to wait for that.
        probing: When a box that does not answer counts as lost.
        start_timeout_s: Seconds until a server that has not answered since its box was started counts as failed.
        wait_timeout_s: Seconds that a lease waits while no box is healthy. It waits without bound while all are busy.
        replayable: Says of an environment's id whether its episodes may be rebuilt after a loss; None says no.
        rebuilds: How often one episode may be.
        seats: Where it is written down which episode is in which box, so that the next server finds them.
        episodes_per_sandbox: Episodes after which a box makes room for a new one; None keeps it.

    Attributes:
        lost: Number of boxes that were healthy and are gone.
        waiting: Number of boxes that are not there because the budget of replacements is spent.
        failed_starts: Number of boxes that could not be had, or were gone before their server had answered.
        restarts: Number of replacements that were started.
        episodes: What became of the episodes that lost their box.
    """

    def __init__(
        self,
        start_box: StartBox,
        connect: ConnectBox,
        *,
        boxes: int,
        slots_per_sandbox: int,
        restarts: RestartBudget | None = None,
        unenforced: bool = False,
        alert: Callable[[str], None] | None = None,
        probing: HeartbeatTimes | None = None,
        start_timeout_s: float = 60.0,
        wait_timeout_s: float = 120.0,
        replayable: Callable[[str], bool] | None = None,
        rebuilds: int = REBUILDS,
        episodes_per_sandbox: int | None = None,
        seats: SessionStore | None = None,
    ) -> None:
        if boxes < 1 or slots_per_sandbox < 1:
            raise ValueError(f"boxes and slots_per_sandbox must be at least 1, got {boxes} and {slots_per_sandbox}")
        self._start_box = start_box
        self._connect = connect
        self._slots_per_box = slots_per_sandbox
        self._budget = restarts or RestartBudget()
        self._gives_up = unenforced
        self._alert = alert or (lambda text: None)
        self._probing = probing or HeartbeatTimes()
        self._start_timeout_s = start_timeout_s
        self._wait_timeout_s = wait_timeout_s
        self._replayable = replayable or (lambda env_id: False)
        self._rebuilds = rebuilds
        self._episodes_per_box = episodes_per_sandbox
        self._seats = seats
        self._boxes = boxes
        self._places = 0
        self._untried: set[int] = set()
        self._all_tried = anyio.Event()
        self._failures = Failures()
        self._ready: list[EnvWorker] = []
        self._waiting: deque[_Waiter] = deque()
        self._dark_since = 0.0
        self._failure: SandboxError = SandboxStartError("fleet", "it is not open")
        self.lost = 0
        self.waiting = 0
        self.failed_starts = 0
        self.restarts = 0
        self.episodes = EpisodeTally()
        self._turns = SuspectQueue() if slots_per_sandbox > 1 else None

    @property
    def capacity(self) -> int:
        """Episodes at once in the boxes that are there or will be replaced."""
        return self._places * self._slots_per_box

    @property
    def why_unready(self) -> str:
        """See `envkit.protocols.WatchedHost`."""
        if any(not box.gone.is_set() for box in self._ready):
            return ""
        return f"no environment sandbox has been healthy for {clock.now() - self._dark_since:.0f} s"

    def lease(self, task: Task) -> FleetEpisode:
        """Play `task` in the healthy box that plays the fewest episodes, waiting while none is free.

        A call of the episode whose box dies goes on in another box where the world can be rebuilt, and raises
        `SandboxLostError` at once where it cannot; see `envkit.fleet.episode.FleetEpisode`.

        Raises:
            SandboxStartError: On entering: no box became healthy in time, or none is left and the budget of
                replacements is spent.
        """
        return self._episode(task, "")

    def lease_as(self, key: str, task: Task) -> FleetEpisode:
        """As `lease`; the episode of this key goes on if it is in one of the boxes and of the same task."""
        return self._episode(task, key)

    def resumable_task(self, key: str) -> Task | None:
        """Return what the episode of this key plays in one of the boxes, since an earlier server; else None."""
        found = None if self._seats is None else self._seats.seat(key)
        return None if found is None or self._box_of(found) is None else found.task

    def resumable_keys(self) -> Sequence[str]:
        """Return the keys of the episodes that an earlier server began in the boxes that are there now."""
        return (
            () if self._seats is None else [key for key in self._seats.seated() if self.resumable_task(key) is not None]
        )

    def _episode(self, task: Task, key: str) -> FleetEpisode:
        rebuilds = self._rebuilds if self._replayable(task.env_id) else 0
        goes_on = bool(key) and self.resumable_task(key) == task
        return FleetEpisode(
            partial(self._seat, task, key),
            rebuilds=rebuilds,
            tally=self.episodes,
            turns=self._turns,
            goes_on=goes_on,
        )

    def _box_of(self, seat: SessionRecord) -> EnvWorker | None:
        return next((box for box in self._ready if box.sandbox.id == seat.box and not box.gone.is_set()), None)

    @asynccontextmanager
    async def _seat(self, task: Task, key: str) -> AsyncIterator[WorkerLease]:
        """Give a place in a box for the length of the block, and in it the lease to be entered."""
        found = self._seats.seat(key) if self._seats is not None and key else None
        box = self._box_of(found) if found is not None and found.task == task else None
        if box is None or found is None:
            box, id = await self._place(), uuid.uuid4().hex
        else:
            id = found.session
            box.load += 1
            box.served += 1
        try:
            if self._seats is not None and key:
                await self._seats.sit(key, SessionRecord(box.sandbox.id, id, task))
            yield WorkerLease(box, task, id)
        finally:
            try:
                if self._seats is not None and key:
                    await self._seats.leave(key)
            finally:
                box.load -= 1
                if box.load == 0 and self._has_served(box):
                    box.end(WorkerEvent.CLOSED, Cause(CauseKind.STOPPED, "it has served its episodes"))
                self._assign()

    async def __aenter__(self) -> Self:
        """Start the boxes.

        Raises:
            SandboxError: None of them came up; this is why the last one did not.
        """
        self._places = self._boxes
        self._untried = set(range(self._boxes))
        self._dark_since = clock.now()
        self._tasks = await anyio.create_task_group().__aenter__()
        try:
            for place in range(self._boxes):
                self._tasks.start_soon(self._keep, place)
            await self._all_tried.wait()
            if not self._ready:
                raise self._failure
        except BaseException as error:
            await self.__aexit__(type(error), error, error.__traceback__)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tasks.cancel_scope.cancel()
        # Only a cancellation is the task group's business: any other error is to leave the block as it is, ungrouped.
        if not isinstance(error, anyio.get_cancelled_exc_class()):
            kind = error = trace = None
        try:
            await self._tasks.__aexit__(kind, error, trace)
        finally:
            self._places = 0
            self._failure = SandboxStartError("fleet", "it is closed")
            self._wake()

    async def _keep(self, place: int) -> None:
        """Keep one place filled, with one box after another, or while the budget lasts."""
        failures = self._failures if self._gives_up else Failures()
        while True:
            failure = await self._live(place)
            if failure is None:
                continue
            if isinstance(failure, SandboxError):
                self._failure = failure
            else:
                self._failure = SandboxStartError("of the fleet", str(failure))
            self._tried(place)
            if isinstance(failure, CapacityError):
                await anyio.sleep(_ROOM_S)
                continue
            now = clock.now()
            due, is_late = failures.add(self._budget, now=now)
            if is_late:
                spent = f"{self._budget.restarts} replacements within {self._budget.window_s:g} s are used up"
                if self._gives_up or due == math.inf:
                    self._failure = SandboxStartError("fleet", f"no box is left, and {spent}; last: {failure}")
                    break
                self._alert(f"boxes of environments: {spent}; one is missing for {due - now:.0f} s; last: {failure}")
            self.waiting += is_late
            await anyio.sleep(due - now)
            self.waiting -= is_late
            self.restarts += 1
        self._places -= 1
        self._wake()

    async def _live(self, place: int) -> EnvkitError | None:
        """Fill a place with a new box, and return why that is over; None if it has served its episodes."""
        try:
            sandbox = await self._start_box()
        except EnvkitError as error:
            self.failed_starts += not isinstance(error, CapacityError)
            return error
        box = EnvWorker(sandbox)
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(box.watch_sandbox)
                tasks.start_soon(box.watch_calls)
                tasks.start_soon(self._serve, box, place)
                await box.gone.wait()
                if box.state is SandboxState.LOST:
                    self.lost += 1
                    self._leave(box)
                    await stop(sandbox)  # first, so that clients do not wait for a farewell of a box that is silent
                tasks.cancel_scope.cancel()
        finally:
            box.end(WorkerEvent.CLOSED, Cause(CauseKind.STOPPED, "the fleet was closed"))
            self._leave(box)
            await stop(sandbox)
        if box.state is SandboxState.STOPPED and box.served:
            return None
        if box.state is SandboxState.LOST:
            return SandboxLostError(sandbox.id, box.cause)
        self.failed_starts += 1
        return SandboxStartError(sandbox.id, box.cause)

    async def _serve(self, box: EnvWorker, place: int) -> None:
        """Connect to a box, open it for episodes, and probe it until it is gone."""
        said = ""
        with anyio.CancelScope(deadline=clock.now() + self._start_timeout_s) as starting:
            while box.state is SandboxState.STARTING:
                try:
                    async with self._connect(box.sandbox) as client:
                        await client.health()
                        starting.deadline = math.inf
                        box.open(client)
                        self._ready.append(box)
                        self._tried(place)
                        self._wake()
                        box.end(WorkerEvent.SILENT, await watch_server(box, client, self._probing))
                except EnvkitError as error:
                    if not error.retry:
                        return box.end(WorkerEvent.GONE, Cause(CauseKind.START_FAILED, f"its env server says: {error}"))
                    said = f" ({error})"
                    await anyio.sleep(_RETRY_S)
        said = f"its env server did not answer within {self._start_timeout_s:g} s{said}"
        return box.end(WorkerEvent.GONE, Cause(CauseKind.START_FAILED, said))

    async def _place(self) -> EnvWorker:
        """Take a place in a healthy box."""
        waiter = _Waiter()
        self._waiting.append(waiter)
        try:
            while True:
                self._assign()
                if waiter.box is not None and not waiter.box.gone.is_set():
                    return waiter.box
                if waiter.box is not None:  # it was lost before we came to it
                    waiter.box = None
                    self._waiting.appendleft(waiter)
                    continue
                if self._places == 0:
                    raise self._failure
                if self._ready:
                    await waiter.woken.wait()
                elif clock.now() < (deadline := self._dark_since + self._wait_timeout_s):
                    with anyio.move_on_after(deadline - clock.now()):
                        await waiter.woken.wait()
                else:
                    waited = f"no box is healthy since {self._wait_timeout_s:g} s"
                    raise SandboxStartError("fleet", f"{waited}; last: {self._failure}")
                waiter.woken = anyio.Event()
        except BaseException:
            if waiter.box is None:
                self._waiting.remove(waiter)
            else:  # it was given a place in the moment in which it gave up
                waiter.box.load -= 1
                self._assign()
            raise

    def _assign(self) -> None:
        """Give free places to who waits longest."""
        while self._waiting:
            box = min(filter(self._is_free, self._ready), key=self._rank, default=None)
            if box is None:
                return
            box.load += 1
            box.served += 1
            waiter = self._waiting.popleft()
            waiter.box = box
            waiter.woken.set()

    def _is_free(self, box: EnvWorker) -> bool:
        return not box.gone.is_set() and box.load < self._slots_per_box and not self._has_served(box)

    def _has_served(self, box: EnvWorker) -> bool:
        # More than its number, where others were given it before an episode of an earlier server was recalled.
        return self._episodes_per_box is not None and box.served >= self._episodes_per_box

    def _rank(self, box: EnvWorker) -> tuple[bool, int]:
        """Those that answer first, and of these those that play the fewest."""
        return clock.now() - box.answered_at >= self._probing.quiet_s, box.load

    def _leave(self, box: EnvWorker) -> None:
        if box in self._ready:
            self._ready.remove(box)
            if not self._ready:
                self._dark_since = clock.now()
            self._wake()

    def _tried(self, place: int) -> None:
        self._untried.discard(place)
        if not self._untried:
            self._all_tried.set()

    def _wake(self) -> None:
        """Let everybody who waits look again: there is another number of boxes."""
        self._assign()
        for waiter in self._waiting:
            waiter.woken.set()


@dataclass(slots=True, eq=False)
class _Waiter:
    """Somebody who waits for a place, and the box in which it was given one."""

    woken: anyio.Event = field(default_factory=anyio.Event)
    box: EnvWorker | None = None
