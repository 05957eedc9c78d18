"""Slots of workers, and the episodes that wait for one, in order of arrival."""

from __future__ import annotations

import math
from collections import deque

import anyio

from envkit import clock
from envkit.errors import EnvkitError, SandboxStartError
from envkit.fleet.env_worker import EnvWorker, WorkerStart
from envkit.types import Cause, CauseKind


class Slots:
    """The slots of workers that are equal.

    Args:
        size: Maximum number of concurrent episodes per worker.
        timeout_s: Seconds that an episode waits while no worker is healthy.
        on_demand: Whether workers are started only when an episode waits, so that the timeout begins with its wait.
        is_extra: Whether a worker ends when it plays no episode and none waits.

    Attributes:
        workers: The healthy workers.
        running: Number of workers that run or will be started. Without one, no episode waits.
        failure: Why the last worker failed.
        empty_since: Time since when no worker has been healthy, if none is.
    """

    def __init__(
        self, start: WorkerStart, size: int, timeout_s: float, *, on_demand: bool, is_extra: bool = False
    ) -> None:
        self.start = start
        self.size = size
        self.is_extra = is_extra
        self.workers: list[EnvWorker] = []
        self.running = 0
        self.failure: EnvkitError = SandboxStartError("fleet", "the fleet is not open")
        self.empty_since = 0.0
        self.timeout_s = timeout_s
        self.on_demand = on_demand
        self._waiting: deque[anyio.Event] = deque()
        """For each waiting episode, an event that is set when a slot may be free."""
        self._arrival = anyio.Event()

    @property
    def is_awaited(self) -> bool:
        """Whether an episode waits for a slot."""
        return bool(self._waiting)

    async def demand(self) -> None:
        """Wait until an episode waits for a slot."""
        while not self._waiting:
            await self._arrival.wait()

    async def take(self) -> EnvWorker:
        """Wait for a slot, and take it in the responsive worker with the fewest episodes.

        Raises:
            EnvkitError: `failure`, if no worker runs any more.
            SandboxStartError: No worker became healthy in time.
        """
        woken, began = anyio.Event(), clock.now() if self.on_demand else 0.0
        self._waiting.append(woken)
        arrival, self._arrival = self._arrival, anyio.Event()
        arrival.set()
        try:
            while self._waiting[0] is not woken or (worker := self._free_worker()) is None:
                if self.running == 0:
                    raise self.failure
                deadline = math.inf if self.workers else max(self.empty_since, began) + self.timeout_s
                if clock.now() >= deadline:
                    waited = f"no healthy worker for {self.timeout_s:g} s"
                    raise SandboxStartError("fleet", f"{waited}; last failure: {self.failure}")
                with anyio.CancelScope(deadline=deadline):
                    await woken.wait()
                if woken.is_set():  # only the first one is
                    woken = self._waiting[0] = anyio.Event()
            worker.load += 1
            return worker
        finally:
            self._waiting.remove(woken)
            self.changed()

    def give_back(self, worker: EnvWorker) -> None:
        """Free the slot of an episode."""
        worker.load -= 1
        self.changed()

    def join(self, worker: EnvWorker) -> None:
        """Add a worker that has become healthy."""
        self.workers.append(worker)
        self.changed()

    def leave(self, worker: EnvWorker) -> None:
        """Remove a worker that has ended."""
        self.workers.remove(worker)
        if not self.workers:
            self.empty_since = clock.now()
        self.changed()

    def changed(self) -> None:
        """Wake the first waiting episode, which wakes the next one. If none waits, end idle extra workers."""
        if self._waiting:
            self._waiting[0].set()
        elif self.is_extra:
            for worker in self.workers:
                if not worker.load:
                    worker.end(Cause(CauseKind.STOPPED, "served its episodes"))

    def _free_worker(self) -> EnvWorker | None:
        free = (worker for worker in self.workers if not worker.gone.is_set() and worker.load < worker.slots)
        return min(free, key=lambda worker: (worker.is_computing, worker.load), default=None)
