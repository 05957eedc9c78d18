"""Fleet host: keeps workers running and assigns their slots to episodes."""

from __future__ import annotations

import math
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Self

import anyio

from envkit import clock
from envkit.errors import CapacityError, EnvkitError, SandboxError, SandboxLostError, SandboxStartError
from envkit.fleet.env_worker import EnvWorker, WorkerLostError, WorkerStart, connect_when_serving
from envkit.fleet.episode import REBUILDS, EpisodeTally, FleetEpisode, Slot
from envkit.fleet.ledger import LeaseLedger, SessionRecord
from envkit.fleet.slots import Slots
from envkit.fleet.suspects import Offenders, Suspicion
from envkit.protocols import EnvHost, Sandbox, ServerPool
from envkit.types import Cause, CauseKind, SandboxState, Task, TenantKey

_SHARED, _EXTRA = ":envs-shared-", ":envs-extra-"
"""Prefixes of the ids of the sandboxes. Clients cannot use them, because their ids must not contain a colon."""
_ALIVE = (SandboxState.LEASED, SandboxState.SUSPECT)


class FleetHost(EnvHost):
    """Plays episodes in a fleet of workers.

    A worker is a sandbox of a pool in which an env server runs. The pool monitors both, and says when a worker may be
    restarted. Use the host with ``async with``: the start of the block waits until each worker has started or failed
    once, and the end stops all workers. Sandboxes of the same spec that an earlier server process left running in the
    pool are used as workers before new ones are started.

    An episode that must play alone (see `envkit.fleet.suspects`) gets an extra worker, which ends when none needs it.

    Args:
        pool: Must be open as long as the host.
        on_demand: Whether a worker is started, and restarted, only when an episode waits for a slot.
        ends_when_spent: Whether all workers share one restart budget, and end when it is spent, so that a training run
            whose workers always fail ends. If false, each worker is restarted as soon as its budget allows it.
        longest_step_s: Maximum duration of a step that blocks the event loop of its server.
        start_timeout_s: Seconds after the start of a sandbox within which its env server must answer.
        wait_timeout_s: Seconds that an episode waits for its slot while no worker is healthy, or for the capacity of an
            extra worker. While healthy workers are busy, it waits without limit.
        replayable: Returns whether episodes of the environment with this id may be rebuilt after the loss of a worker.
        session_store: Records in which worker each episode runs, so that the server can resume its episodes after a
            restart; None to record nothing.
        extra_start: How to start an extra worker; None means `start`.
        offenders: Counts the losses attributed to each environment of each tenant; None to count none.

    Attributes:
        lost: Number of workers that were lost after they had been healthy.
        waiting: Number of workers that wait for their restart because the restart budget is spent.
        failed_starts: Number of workers that ended before their server answered.
        episodes: Counts of rebuilt and void episodes.
    """

    def __init__(
        self,
        pool: ServerPool,
        start: WorkerStart,
        *,
        workers: int,
        slots_per_sandbox: int,
        on_demand: bool = False,
        ends_when_spent: bool = False,
        longest_step_s: float = 300.0,
        start_timeout_s: float = 60.0,
        wait_timeout_s: float = 120.0,
        replayable: Callable[[str], bool] = lambda env_id: False,
        session_store: LeaseLedger | None = None,
        extra: int = 1,
        extra_start: WorkerStart | None = None,
        offenders: Offenders | None = None,
    ) -> None:
        if workers < 1 or slots_per_sandbox < 1:
            raise ValueError(f"workers and slots_per_sandbox must be at least 1, got {workers} and {slots_per_sandbox}")
        self._pool = pool
        self._workers = workers
        self._ends_when_spent = ends_when_spent
        self._longest_step_s = longest_step_s
        self._start_timeout_s = start_timeout_s
        self._replayable = replayable
        self._session_store = session_store
        self._max_extra = extra
        self._offenders = offenders
        self._left_running: list[str] = []
        self._untried: set[int] = set()
        self._all_tried = anyio.Event()
        self._shared = Slots(start, slots_per_sandbox, wait_timeout_s, on_demand=on_demand)
        self._extra = Slots(extra_start or start, 1, wait_timeout_s, on_demand=True, is_extra=True)
        self.lost = 0
        self.waiting = 0
        self.failed_starts = 0
        self.episodes = EpisodeTally()

    @property
    def capacity(self) -> int:
        """Maximum number of concurrent episodes in all workers together, including those that are being restarted."""
        return self._shared.running * self._shared.size

    @property
    def why_unready(self) -> str:
        if any(not worker.gone.is_set() for worker in self._shared.workers):
            return ""
        return f"no environment sandbox has been healthy for {clock.now() - self._shared.empty_since:.0f} s"

    def partition_of(self, env_id: str, tenant: str) -> tuple[str, int]:
        if self._offenders is not None and self._offenders.is_isolated(tenant, env_id):
            return "environments in their own sandboxes", self._offenders.max_isolated
        return "environments", self.capacity

    def lease(self, task: Task) -> FleetEpisode:
        """Return an episode of `task`; see `envkit.fleet.episode.FleetEpisode`. Its start waits for a free slot.

        Raises:
            EnvRejectedError: New episodes of this environment are rejected.
            SandboxStartError: When the episode is entered: no worker became healthy in time, or all workers are lost
                and the restart budget is spent.
        """
        return self.lease_as(None, task)

    def lease_as(self, key: TenantKey | None, task: Task) -> FleetEpisode:
        """Like `lease`, but if an episode of `task` is recorded under `key` and its worker still runs, resume it."""
        tenant = "" if key is None else key.tenant
        rebuilds = REBUILDS if self._replayable(task.env_id) else 0
        if key is not None and self.resumable_task(key) == task:
            suspicion = Suspicion(0)  # actions of a previous server process cannot be replayed
        elif self._offenders is None:
            suspicion = Suspicion(rebuilds)
        else:
            is_isolated = self._offenders.is_isolated(tenant, task.env_id)
            on_attributed = partial(self._offenders.record, tenant, task.env_id)
            suspicion = Suspicion(rebuilds, is_isolated=is_isolated, on_attributed=on_attributed)
        return FleetEpisode(partial(self._open_slot, task, key), suspicion, self.episodes)

    def resumable_task(self, key: TenantKey) -> Task | None:
        """Return the task of the episode that is recorded under `key`; None without one, or if its worker has ended.

        An earlier server process may have recorded the episode.
        """
        found = self._recorded(key)
        return None if found is None else found[1].task

    def resumable_keys(self) -> Sequence[TenantKey]:
        keys = () if self._session_store is None else self._session_store.records
        return [key for key in keys if self.resumable_task(key) is not None]

    def _recorded(self, key: TenantKey | None) -> tuple[EnvWorker, SessionRecord] | None:
        """Return in which worker the recorded episode `key` runs; None without a record, or if the worker has ended."""
        record = None if key is None or self._session_store is None else self._session_store.records.get(key)
        running = (worker for worker in self._shared.workers if not worker.gone.is_set())
        found = (worker for worker in running if record is not None and worker.sandbox.id == record.sandbox_id)
        return next(((worker, record) for worker in found if record is not None), None)

    @asynccontextmanager
    async def _open_slot(self, task: Task, key: TenantKey | None, alone: bool) -> AsyncIterator[Slot]:
        """Hold a slot in a worker for the duration of the block; if `alone`, in one that has only this slot.

        The session store records the episode under `key`. Extra workers do not outlive the server, so the episodes in
        them are not recorded. Raises the errors of `lease`.
        """
        slots = self._extra if alone and self._shared.size > 1 else self._shared
        store = None if key is None or slots is self._extra else self._session_store
        found = None if store is None else self._recorded(key)
        if found is not None and found[1].task == task:
            worker, id = found[0], found[1].session
            worker.load += 1
        else:
            if slots is self._extra and self._extra.running < self._max_extra:
                self._extra.running += 1
                self._tasks.start_soon(self._keep, self._extra, self._extra.running)
            worker, id = await slots.take(), uuid.uuid4().hex
        try:
            if store is not None and key is not None:
                await store.record(key, SessionRecord(worker.sandbox.id, id, task))
            yield worker, worker.client.lease(task, id=id)
        finally:
            try:
                if store is not None and key is not None:
                    await store.forget(key)
            finally:
                slots.give_back(worker)

    async def __aenter__(self) -> Self:
        """Start the workers. If all of them fail, raise the `SandboxError` of the worker that failed last."""
        await self._find_left_running()
        self._shared.running = self._workers
        self._shared.empty_since = clock.now()
        self._untried = set(range(self._workers))
        self._tasks = await anyio.create_task_group().__aenter__()
        try:
            for number in range(self._workers):
                self._tasks.start_soon(self._keep, self._shared, number)
            if not self._shared.on_demand:
                await self._all_tried.wait()
                if not self._shared.workers:
                    raise self._shared.failure
        except BaseException as error:
            await self.__aexit__(type(error), error, error.__traceback__)
            raise
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            await clock.end_tasks(self._tasks, error)
        finally:
            self._max_extra = 0
            for slots in (self._shared, self._extra):
                slots.running = 0
                slots.failure = SandboxStartError("fleet", "the fleet is closed")
                slots.changed()

    async def _find_left_running(self) -> None:
        """Find the sandboxes that an earlier server process left running; stop those that this host cannot use."""
        # Only sandboxes without a tenant belong to the server; a tenant may use the same ids for its own sandboxes.
        views = self._pool.views(tenant="")
        found = [view for view in views if view.id.startswith((_SHARED, _EXTRA)) and view.state in _ALIVE]
        usable = [view.id for view in found if view.id.startswith(_SHARED) and view.spec == self._shared.start.spec]
        self._left_running = usable[: self._workers]
        for view in found:
            if view.id not in self._left_running:
                await self._pool.stop(view.id)

    async def _keep(self, slots: Slots, number: int) -> None:
        """Run worker `number` of `slots`, and restart it after each end, as soon as the restart budget allows it.

        An extra worker runs only as long as episodes need it.
        """
        # Let the host open with fewer workers: wait for capacity only after it was missing once.
        wait_s = slots.timeout_s if slots.is_extra else None
        while slots.is_awaited or not slots.is_extra:
            if slots.on_demand:
                await slots.demand()
            attributed = anyio.Event()
            try:
                worker = await self._run(slots, number, await self._sandbox(slots, wait_s))
            except EnvkitError as error:
                if isinstance(error, SandboxStartError) and error.cause.kind is CauseKind.STOPPED:
                    continue  # stopped during its start, as by a drain
                failure = error
            else:
                if not worker.is_lost:
                    continue
                failure, attributed = WorkerLostError(worker), worker.attributed
            slots.failure = failure if isinstance(failure, SandboxError) else SandboxStartError("fleet", str(failure))
            self._tried(number)
            if not isinstance(failure, CapacityError):
                if not await self._may_restart(slots, number, attributed):
                    break
            elif slots.is_extra:
                break
            else:
                wait_s = math.inf
        slots.running -= 1
        slots.changed()

    async def _may_restart(self, slots: Slots, number: int, attributed: anyio.Event) -> bool:
        """Wait until a worker that failed may be restarted; return False if it may not.

        A loss does not count against the restart budget from when it is attributed to an episode.
        """
        name, failure = "environment workers", slots.failure
        if self._ends_when_spent:
            restart = self._pool.failed(slots, name, failure)
        else:
            restart = self._pool.failed((slots, number), name, failure, excuse=attributed)
        if restart.spent and (self._ends_when_spent or restart.at == math.inf):
            slots.failure = SandboxStartError("fleet", f"no worker left; {restart.spent}; last failure: {failure}")
            return False
        self.waiting += bool(restart.spent)
        with anyio.move_on_after(restart.at - clock.now()):
            await attributed.wait()
        self.waiting -= bool(restart.spent)
        return True

    async def _sandbox(self, slots: Slots, wait_s: float | None) -> Sandbox:
        """Return a sandbox that an earlier server process left running; if all of them are in use, start one."""
        if self._left_running and not slots.is_extra:
            return self._pool.get(self._left_running.pop())
        id = f"{_EXTRA if slots.is_extra else _SHARED}{uuid.uuid4().hex[:8]}"
        try:
            await self._pool.create(id, slots.start.spec, wait_s=wait_s)
        except SandboxError:
            self.failed_starts += 1
            raise
        return self._pool.get(id)

    async def _run(self, slots: Slots, number: int, sandbox: Sandbox) -> EnvWorker:
        """Run a worker in `sandbox` until it ends, and return it; raise `SandboxStartError` if never healthy."""
        worker: EnvWorker | None = None
        cause = Cause(CauseKind.START_FAILED, f"env server did not answer within {self._start_timeout_s:g} s")
        try:
            with anyio.CancelScope(deadline=clock.now() + self._start_timeout_s) as starting:
                async with connect_when_serving(slots.start.connect, sandbox) as client:
                    starting.deadline = math.inf
                    worker = EnvWorker(self._pool, sandbox, client, slots.size, self._longest_step_s, slots.is_extra)
                    slots.join(worker)
                    self._tried(number)
                    try:
                        await worker.gone.wait()
                    finally:
                        worker.end(Cause(CauseKind.STOPPED, "the fleet was closed"))
                        self.lost += worker.is_lost
                        slots.leave(worker)
                        await sandbox.stop()  # before the client, which waits for a hanging server, is closed
        except SandboxLostError as error:
            cause = error.cause
        except EnvkitError as error:
            cause = Cause(CauseKind.START_FAILED, f"env server error: {error}")
        finally:
            await sandbox.stop()
        if worker is None:
            self.failed_starts += 1
            raise SandboxStartError(sandbox.id, cause)
        return worker

    def _tried(self, number: int) -> None:
        self._untried.discard(number)
        if not self._untried:
            self._all_tried.set()
