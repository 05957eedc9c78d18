"""Fleet host: keeps workers running and assigns their slots to episodes."""

from __future__ import annotations

import math
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, Self, TypeAlias

import anyio

from envkit import clock
from envkit.errors import CapacityError, EnvkitError, SandboxError, SandboxStartError
from envkit.fleet.env_worker import (
    ConnectSandbox,
    EnvWorker,
    WorkerLostError,
    WorkerSlot,
    connect_when_serving,
)
from envkit.fleet.episode import REBUILDS, EpisodeTally, FleetEpisode
from envkit.fleet.ledger import LeaseLedger, SessionRecord
from envkit.fleet.routing import Offenders
from envkit.fleet.worker_health import HeartbeatTimes
from envkit.protocols import EnvHost, Sandbox, ServerPool
from envkit.restarts import Failures, RestartBudget
from envkit.types import Cause, CauseKind, SandboxSpec, SandboxState, Task, TenantKey

WorkerKind: TypeAlias = Literal["shared", "own", "suspect", "trusted"]

_ENV_SANDBOX = ":envs-"
"""Prefix of the ids of the workers' sandboxes. Clients cannot use it, because their ids must not contain a colon."""
_ROOM_S = 1.0
"""Seconds between two attempts to start a sandbox while the pool has no capacity."""
_ALIVE = (SandboxState.LEASED, SandboxState.SUSPECT)


class FleetHost(EnvHost):
    """Plays episodes in a fleet of workers.

    A worker is a sandbox of a pool in which an env server runs. Use the host with ``async with``: the start of the
    block waits until each worker has started or failed once, and the end stops all workers. Sandboxes of the same kind
    and spec that an earlier server process left running in the pool are used as workers before new ones are started.

    Args:
        pool: Starts, monitors and stops the sandboxes; must be open as long as the host.
        spec: Spec of the sandboxes.
        connect: Opens a client of the env server in a sandbox; raises `UnreachableError` if the server does not listen
            yet.
        kind: Kind of the workers, which is part of the ids of their sandboxes. ``"shared"`` workers always run.
            ``"suspect"`` and ``"own"`` workers run only while episodes wait for them or are played in them. An
            ``"own"`` worker plays only one episode. A ``"trusted"`` worker starts with its first episode, and then
            always runs.
        workers: Number of workers.
        slots_per_sandbox: Maximum number of concurrent episodes per worker.
        restarts: Restart budget of each worker, or of all workers together if `ends_when_spent`. A start that failed
            because the pool had no capacity does not count.
        ends_when_spent: Whether a lost worker is not restarted when the budget is spent, so that a training run whose
            workers always fail ends. If false, the worker is restarted as soon as the budget allows it.
        heartbeat: The heartbeat settings.
        start_timeout_s: Seconds after the start of a sandbox within which its env server must answer.
        wait_timeout_s: Seconds that an episode waits for its slot while no worker is healthy. While healthy workers are
            busy, it waits without limit.
        replayable: Returns whether episodes of the environment with this id may be rebuilt after the loss of a worker;
            None to rebuild no episodes.
        session_store: Records in which worker each episode runs, so that the server can resume its episodes after a
            restart; None to record nothing.
        suspects: Host with workers in which this host's episodes repeat suspect calls (calls that may have caused a
            loss), without other episodes beside them; None to repeat suspect calls in this host's workers.
        offenders: Counts the losses attributed to each environment of each tenant; None to count none.

    Attributes:
        lost: Number of workers that were lost after they had been healthy.
        waiting: Number of workers that wait for their restart because the restart budget is spent.
        failed_starts: Number of workers that ended before their server answered.
        restarts: Number of restarts of workers.
        episodes: Counts of rebuilt and void episodes.
    """

    def __init__(
        self,
        pool: ServerPool,
        spec: SandboxSpec,
        connect: ConnectSandbox,
        *,
        kind: WorkerKind = "shared",
        workers: int,
        slots_per_sandbox: int,
        restarts: RestartBudget | None = None,
        ends_when_spent: bool = False,
        heartbeat: HeartbeatTimes | None = None,
        start_timeout_s: float = 60.0,
        wait_timeout_s: float = 120.0,
        replayable: Callable[[str], bool] | None = None,
        session_store: LeaseLedger | None = None,
        suspects: FleetHost | None = None,
        offenders: Offenders | None = None,
    ) -> None:
        if workers < 1 or slots_per_sandbox < 1:
            raise ValueError(f"workers and slots_per_sandbox must be at least 1, got {workers} and {slots_per_sandbox}")
        self._pool = pool
        self._spec = spec
        self._connect = connect
        self._prefix = f"{_ENV_SANDBOX}{kind}-"
        self._left_running: list[str] = []
        self._was_full = False
        self._slots_per_worker = slots_per_sandbox
        self._budget = restarts or RestartBudget()
        self._ends_when_spent = ends_when_spent
        self._heartbeat = heartbeat or HeartbeatTimes()
        self._start_timeout_s = start_timeout_s
        self._wait_timeout_s = wait_timeout_s
        self._replayable = replayable or (lambda env_id: False)
        self._plays_once = kind == "own"
        self._session_store = session_store
        self._worker_count = workers
        self._kept_workers = 0
        self._untried: set[int] = set()
        self._all_tried = anyio.Event()
        self._failures = Failures()
        self._ready: list[EnvWorker] = []
        self._waiting: deque[_Waiter] = deque()
        self._unready_since = 0.0
        self._failure: SandboxError = SandboxStartError("fleet", "the fleet is not open")
        self.lost = 0
        self.waiting = 0
        self.failed_starts = 0
        self.restarts = 0
        self.episodes = EpisodeTally()
        self._is_on_demand = kind != "shared"
        self._ends_idle = kind in ("suspect", "own")
        self._demand = anyio.Event()
        self._suspects = suspects
        self._offenders = offenders

    @property
    def capacity(self) -> int:
        """Maximum number of concurrent episodes in all workers together, including those that are being restarted."""
        return self._kept_workers * self._slots_per_worker

    @property
    def why_unready(self) -> str:
        if any(not worker.gone.is_set() for worker in self._ready):
            return ""
        return f"no environment sandbox has been healthy for {clock.now() - self._unready_since:.0f} s"

    def lease(self, task: Task) -> FleetEpisode:
        """Return an episode of `task`. To start it, enter it with ``async with``.

        The start waits for a free slot, and takes it in the healthy worker with the fewest episodes. If the worker is
        lost during a call, the episode is rebuilt in another worker, which repeats the call. If the environment cannot
        be rebuilt, the call raises `SandboxLostError`; see `envkit.fleet.episode.FleetEpisode`.

        Raises:
            SandboxStartError: When the episode is entered: no worker became healthy in time, or all workers are lost
                and the restart budget is spent.
        """
        return self._episode(task, None)

    def lease_as(self, key: TenantKey, task: Task) -> FleetEpisode:
        """Like `lease`, but if an episode of `task` is recorded under `key` and its worker still runs, resume it."""
        return self._episode(task, key)

    def resumable_task(self, key: TenantKey) -> Task | None:
        """Return the task of the episode that is recorded under `key`; None without one, or if its worker has ended.

        An earlier server process may have recorded the episode.
        """
        found = None if self._session_store is None else self._session_store.get(key)
        return None if found is None or self._worker_of(found) is None else found.task

    def resumable_keys(self) -> Sequence[TenantKey]:
        keys = () if self._session_store is None else self._session_store.keys()
        return [key for key in keys if self.resumable_task(key) is not None]

    def _episode(self, task: Task, key: TenantKey | None) -> FleetEpisode:
        is_resumed = key is not None and self.resumable_task(key) == task
        tenant = "" if key is None else key.tenant
        return FleetEpisode(
            partial(self.open_slot, task, key),
            rebuilds=REBUILDS if self._replayable(task.env_id) else 0,
            tally=self.episodes,
            open_alone=None if self._suspects is None else partial(self._suspects.open_slot, task, None),
            on_attributed=None if self._offenders is None else partial(self._offenders.record, tenant, task.env_id),
            goes_on=is_resumed,
        )

    def _worker_of(self, record: SessionRecord) -> EnvWorker | None:
        return next(
            (worker for worker in self._ready if worker.sandbox.id == record.sandbox_id and not worker.gone.is_set()),
            None,
        )

    @asynccontextmanager
    async def open_slot(self, task: Task, key: TenantKey | None) -> AsyncIterator[WorkerSlot]:
        """Hold a slot in a worker for the duration of the block.

        Args:
            task: The task to play.
            key: Key under which the session store records the episode; None to record nothing.

        Raises:
            SandboxStartError: See `lease`.
        """
        store = self._session_store
        found = None if store is None or key is None else store.get(key)
        worker = self._worker_of(found) if found is not None and found.task == task else None
        if worker is None or found is None:
            worker, id = await self._take_slot(), uuid.uuid4().hex
        else:
            id = found.session
            worker.load += 1
            worker.served += 1
        try:
            if store is not None and key is not None:
                await store.record(key, SessionRecord(worker.sandbox.id, id, task))
            yield worker.slot(task, id)
        finally:
            try:
                if store is not None and key is not None:
                    await store.forget(key)
            finally:
                worker.load -= 1
                is_idle = self._ends_idle and not self._waiting
                if worker.load == 0 and (is_idle or self._plays_once):
                    worker.end(Cause(CauseKind.STOPPED, "served its episodes"))
                self._wake_first()

    async def __aenter__(self) -> Self:
        """Start the workers.

        Raises:
            SandboxError: All workers failed to start. The error is that of the worker that failed last.
        """
        await self._find_left_running()
        self._kept_workers = self._worker_count
        self._untried = set(range(len(self._left_running) if self._is_on_demand else self._worker_count))
        self._unready_since = clock.now()
        self._tasks = await anyio.create_task_group().__aenter__()
        try:
            for number in range(self._worker_count):
                self._tasks.start_soon(self._keep, number)
            if self._untried:
                await self._all_tried.wait()
            if not self._ready and not self._is_on_demand:
                raise self._failure
        except BaseException as error:
            await self.__aexit__(type(error), error, error.__traceback__)
            raise
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            await clock.end_tasks(self._tasks, error)
        finally:
            self._kept_workers = 0
            self._failure = SandboxStartError("fleet", "the fleet is closed")
            self._wake()

    async def _keep(self, number: int) -> None:
        """Run worker `number`, and restart it after each end, as soon as the restart budget allows it."""
        failures = self._failures if self._ends_when_spent else Failures()
        while True:
            if self._is_on_demand and number not in self._untried:
                while len(self._waiting) <= len(self._untried):  # those workers will serve all that wait
                    await self._demand.wait()
                self._untried.add(number)
            failure = await self._live(number)
            if failure is None:
                continue
            if isinstance(failure, SandboxError):
                self._failure = failure
            else:
                self._failure = SandboxStartError("of the fleet", str(failure))
            self._tried(number)
            if isinstance(failure, CapacityError):
                await anyio.sleep(_ROOM_S)
                continue
            now = clock.now()
            attributed = anyio.Event()
            if isinstance(failure, WorkerLostError) and not self._ends_when_spent:
                attributed = failure.worker.attributed
            due, is_late = failures.add(self._budget, now=now, excuse=attributed)
            if is_late:
                spent = f"restart budget spent ({self._budget.restarts} in {self._budget.window_s:g} s)"
                if self._ends_when_spent or due == math.inf:
                    self._failure = SandboxStartError("fleet", f"no worker left; {spent}; last failure: {failure}")
                    break
                text = f"environment workers: {spent}; next restart in {due - now:.0f} s; last failure: {failure}"
                self._pool.alert("restarts", text)
            self.waiting += is_late
            with anyio.move_on_after(due - now):
                await attributed.wait()  # a loss attributed to an episode needs no delay
            self.waiting -= is_late
            self.restarts += 1
        self._kept_workers -= 1
        self._wake()

    async def _find_left_running(self) -> None:
        """Find the sandboxes that an earlier server process left running; stop those that this host cannot use."""
        # Only sandboxes without a tenant belong to the server; a tenant may use the same ids for its own sandboxes.
        views = self._pool.views(tenant="")
        found = [view for view in views if view.id.startswith(self._prefix) and view.state in _ALIVE]
        self._left_running = [view.id for view in found if view.spec == self._spec][: self._worker_count]
        for view in found:
            if view.id not in self._left_running:
                await self._pool.stop(view.id)

    async def _start(self) -> Sandbox:
        """Return a sandbox that an earlier server process left running; if all of them are in use, start one."""
        if self._left_running:
            return self._pool.get(self._left_running.pop())
        id = f"{self._prefix}{uuid.uuid4().hex[:8]}"
        try:
            # Wait for capacity only after it was missing once, so that the host can open with fewer workers.
            await self._pool.create(id, self._spec, wait_s=math.inf if self._was_full else None)
        except CapacityError:
            self._was_full = True
            raise
        return self._pool.get(id)

    async def _live(self, number: int) -> EnvkitError | None:
        """Run one worker until it ends; return why it failed, or None if it stopped because it had no more episodes."""
        try:
            sandbox = await self._start()
        except EnvkitError as error:
            self.failed_starts += not isinstance(error, CapacityError)
            return error
        worker = EnvWorker(sandbox)
        try:
            self._pool.watch(sandbox.id, partial(self._serve, worker, number), worker.end)
            await worker.gone.wait()
            self.lost += worker.is_lost
        finally:
            worker.end(Cause(CauseKind.STOPPED, "the fleet was closed"))
            self._leave(worker)
            await sandbox.stop()
        if worker.is_lost:
            return WorkerLostError(worker)
        if worker.served:
            return None
        self.failed_starts += 1
        return SandboxStartError(sandbox.id, worker.cause)

    async def _serve(self, worker: EnvWorker, number: int) -> Cause:
        """Let `worker` play episodes as soon as its env server answers; when the server is lost, return the cause."""
        with anyio.CancelScope(deadline=clock.now() + self._start_timeout_s) as starting:
            try:
                async with connect_when_serving(self._connect, worker.sandbox) as client:
                    starting.deadline = math.inf
                    if worker.gone.is_set():
                        return worker.cause
                    monitor = worker.open(client, self._heartbeat)
                    self._ready.append(worker)
                    self._tried(number)
                    self._wake()
                    return await monitor.run()
            except EnvkitError as error:
                return Cause(CauseKind.START_FAILED, f"env server error: {error}")
        return Cause(CauseKind.START_FAILED, f"env server did not answer within {self._start_timeout_s:g} s")

    async def _take_slot(self) -> EnvWorker:
        """Wait for a slot in a healthy worker, and take it. Calls are served in order of arrival."""
        waiter = _Waiter()
        self._waiting.append(waiter)
        demand, self._demand = self._demand, anyio.Event()
        demand.set()  # wakes the tasks that start workers on demand
        began = clock.now() if self._is_on_demand else 0.0
        try:
            while self._waiting[0] is not waiter or (worker := self._free_worker()) is None:
                if self._kept_workers == 0:
                    raise self._failure
                deadline = max(self._unready_since, began) + self._wait_timeout_s if not self._ready else math.inf
                if clock.now() >= deadline:
                    waited = f"no healthy worker for {self._wait_timeout_s:g} s"
                    raise SandboxStartError("fleet", f"{waited}; last failure: {self._failure}")
                waiter.woken = anyio.Event()
                with anyio.CancelScope(deadline=deadline):
                    await waiter.woken.wait()
            worker.load += 1
            worker.served += 1
            return worker
        finally:
            self._waiting.remove(waiter)
            self._wake_first()

    def _free_worker(self) -> EnvWorker | None:
        return min(filter(self._is_free, self._ready), key=self._rank, default=None)

    def _is_free(self, worker: EnvWorker) -> bool:
        is_used_up = self._plays_once and worker.served
        return not worker.gone.is_set() and worker.load < self._slots_per_worker and not is_used_up

    def _rank(self, worker: EnvWorker) -> tuple[bool, int]:
        """Return a sort key: responsive workers come first, and among them those with the fewest episodes."""
        return worker.monitor is not None and worker.monitor.is_unresponsive, worker.load

    def _leave(self, worker: EnvWorker) -> None:
        if worker in self._ready:
            self._ready.remove(worker)
            if not self._ready:
                self._unready_since = clock.now()
            self._wake()

    def _tried(self, number: int) -> None:
        self._untried.discard(number)
        if not self._untried:
            self._all_tried.set()

    def _wake_first(self) -> None:
        """Let the first waiting episode look for a free slot."""
        if self._waiting:
            self._waiting[0].woken.set()

    def _wake(self) -> None:
        """Wake all waiting episodes, because the number of workers has changed."""
        for waiter in self._waiting:
            waiter.woken.set()


@dataclass(slots=True, eq=False)
class _Waiter:
    """An episode that waits for a slot. `woken` is set when a slot may be free."""

    woken: anyio.Event = field(default_factory=anyio.Event)
