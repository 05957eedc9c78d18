"""Workers whose environments echo all actions, so that tests can identify an episode and check its rebuild."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import anyio

from envkit.errors import UnreachableError
from envkit.protocols import Episode
from envkit.restarts import RestartBudget
from envkit.types import JSON, Cause, Observation, Reset, Step, Task
from tests.causes import cause
from tests.fleet.fleets import ScriptedFleet, ScriptedPool

TASK = Task("Echo-v0", 3)
PLENTY = RestartBudget(restarts=10**6, first_delay_s=0.1, longest_delay_s=1.0)


class Worker:
    """A sandbox, its server and the server's client in one; its environments echo all actions."""

    capacity = 99

    def __init__(self, name: str, *, accent: str = "", dies_after: int | None = None) -> None:
        self.id = name
        self.accent = accent
        self.dies_after = dies_after
        self.calls = 0
        self.died = anyio.Event()
        self.cause = ""

    def die(self, cause: str) -> None:
        self.cause = self.cause or cause
        self.died.set()

    async def wait(self) -> Cause:
        await self.died.wait()
        return cause(self.cause)

    async def stop(self) -> None:
        self.die("stopped")

    async def probe(self, timeout_s: float) -> float:
        return 0.0

    async def stats(self) -> Mapping[str, JSON]:
        return {}

    async def health(self) -> None:
        self._check()

    async def heartbeat(self) -> None:
        self._check()

    @asynccontextmanager
    async def lease(self, task: Task, *, id: str | None = None) -> AsyncIterator[Episode]:
        self._check()
        yield Echo(self, task)

    async def answer(self) -> None:
        """Sleep for a moment, or die during the call."""
        await anyio.sleep(0.01)
        if self.calls == self.dies_after:
            self.die("killed by signal 9")
        self.calls += 1
        self._check()

    def _check(self) -> None:
        if self.died.is_set():
            raise UnreachableError("connection refused")


class Echo(Episode):
    """An episode that answers with its seed and all actions so far."""

    turn = 0

    def __init__(self, worker: Worker, task: Task) -> None:
        self.worker = worker
        self.words = [str(task.seed)]

    async def reset(self) -> Reset:
        await self.worker.answer()
        return Reset(Observation(" ".join(self.words)), {})

    async def step(self, action: str) -> Step:
        await self.worker.answer()
        self.words.append(action + self.worker.accent)
        reward = float("nan") if action == "nothing" else float(len(self.words))
        return Step(Observation(" ".join(self.words)), reward, len(self.words) > 8, False, {"worker": self.worker.id})

    async def grade(self) -> float | None:
        await self.worker.answer()
        return 0.5

    async def repeat_step(self, action: str) -> Step:
        raise NotImplementedError


def fleet_of(
    *workers: Worker,
    at_once: int = 1,
    slots_per_sandbox: int = 1,
    is_replayable: bool = True,
    restarts: RestartBudget = PLENTY,
    **settings: Any,
) -> ScriptedFleet:
    """Return a fleet that starts `workers` one after another."""
    queue = list(workers)

    async def start() -> Worker:
        return queue.pop(0)

    return ScriptedFleet(
        ScriptedPool(start, restarts=restarts),
        workers=at_once,
        slots_per_sandbox=slots_per_sandbox,
        replayable=lambda env_id: is_replayable and env_id == TASK.env_id,
        **settings,
    )
