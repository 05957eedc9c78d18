"""Shared by the tests of fleets: a pool of scripted workers on virtual time, and players."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, Self, cast

import anyio
import anyio.lowlevel

from envkit import clock
from envkit.errors import EnvkitError, SandboxLostError, SandboxStartError, UnreachableError
from envkit.fleet import FleetHost, WorkerClient, WorkerStart
from envkit.fleet.ledger import SessionRecord
from envkit.protocols import Episode, Sandbox, SandboxBackend
from envkit.restarts import RestartBudget
from envkit.sandbox.pool import Pool
from envkit.sandbox.pool.health import LivenessTimes
from envkit.sandbox.pool.node import Node
from envkit.types import JSON, Cause, Observation, Reset, SandboxSpec, Step, Task, TenantKey
from tests.causes import cause
from tests.keys import key

TASK = Task("Game-v0", 7)


class ScriptedWorker(WorkerClient, Protocol):
    """A sandbox, its env server, and the server's client in one."""

    id: str

    async def probe(self, timeout_s: float) -> float: ...

    async def stats(self) -> Mapping[str, JSON]: ...

    async def wait(self) -> Cause: ...

    async def stop(self) -> None: ...


class ScriptedPool(Pool):
    """A pool of one node, on which `start` starts the workers."""

    def __init__(
        self,
        start: Callable[[], Awaitable[ScriptedWorker]],
        *,
        restarts: RestartBudget | None = None,
        liveness: LivenessTimes | None = None,
    ) -> None:
        self.node = Node("here", cast(SandboxBackend, self))
        super().__init__([self.node], restarts=restarts or RestartBudget(), liveness_times=liveness)
        self._start = start
        self._workers: dict[str, ScriptedWorker] = {}

    async def start(self, spec: SandboxSpec) -> ScriptedWorker:
        worker = await self._start()
        self._workers[worker.id] = worker
        return worker

    @asynccontextmanager
    async def connect(self, sandbox: Sandbox) -> AsyncIterator[WorkerClient]:
        yield self._workers[self.view(sandbox.id).backend_id]


class ScriptedFleet(FleetHost):
    """A fleet that opens its pool."""

    def __init__(self, pool: ScriptedPool, **settings: Any) -> None:
        super().__init__(pool, WorkerStart(SandboxSpec(), pool.connect), **settings)
        self.pool = pool

    async def __aenter__(self) -> Self:
        await self.pool.__aenter__()
        return await super().__aenter__()

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            await super().__aexit__(kind, error, trace)
        finally:
            await self.pool.__aexit__(None, error, None)


@dataclass(eq=False)
class Worker(Episode):
    """A sandbox that dies on `die`, with a server that answers while `answers`; also its client and episode."""

    id: str
    answers: bool = True
    hogs: bool = False
    knows_its_cause: bool = True
    step_s: float = 1.0
    died: anyio.Event = field(default_factory=anyio.Event)
    cause: str = ""
    playing: int = 0
    most_playing: int = 0
    stopped_at: float | None = None
    capacity: int = 99
    turn: int = 0

    def die(self, cause: str) -> None:
        self.cause = cause
        self.died.set()

    async def wait(self) -> Cause:
        await self.died.wait()
        if not self.knows_its_cause:
            await anyio.sleep_forever()
        return cause(self.cause)

    async def stop(self) -> None:
        self.stopped_at = clock.now()
        self.die("stopped")

    async def probe(self, timeout_s: float) -> float:
        return 0.0

    async def stats(self) -> Mapping[str, JSON]:
        return {}

    async def health(self) -> None:
        await self._talk()

    async def heartbeat(self) -> None:
        if not self.hogs:
            await self._talk()

    @asynccontextmanager
    async def lease(self, task: Task, *, id: str | None = None) -> AsyncIterator[Episode]:
        await self._talk()
        self.playing += 1
        self.most_playing = max(self.playing, self.most_playing)
        try:
            yield self
        finally:
            self.playing -= 1
            await self._talk()

    async def reset(self) -> Reset:
        await self._talk()
        return Reset(Observation(self.id), {})

    async def step(self, action: str) -> Step:
        await self._talk()
        await anyio.sleep(self.step_s)
        await self._talk()
        return Step(Observation(f"{self.id} {action}"), 0.0, False, False, {})

    async def repeat_step(self, action: str) -> Step:
        raise NotImplementedError

    async def _talk(self) -> None:
        if self.died.is_set():
            raise UnreachableError("connection refused")
        while not self.answers:  # noqa: ASYNC110 - late
            await anyio.sleep(0.05)
        await anyio.lowlevel.checkpoint()


class FakeSessionStore:
    """A session store in memory that cannot write while it is full."""

    def __init__(self, **sessions: SessionRecord) -> None:
        self.records = {key(id): record for id, record in sessions.items()}
        self.is_full = False

    async def record(self, key: TenantKey, record: SessionRecord) -> None:
        self._write()
        self.records[key] = record

    async def forget(self, *keys: TenantKey) -> None:
        self._write()
        for one in keys:
            self.records.pop(one, None)

    def _write(self) -> None:
        if self.is_full:
            raise EnvkitError("the disk is full")


class WorkerStarter:
    """Starts workers by a script: each entry starts one worker or is the error to raise; the last entry repeats."""

    def __init__(self, *script: Callable[[str], Worker] | Exception, start_s: float = 0.5) -> None:
        self.script = script or (Worker,)
        self.start_s = start_s
        self.workers: list[Worker] = []
        self.starts: list[float] = []

    async def start(self) -> Worker:
        self.starts.append(clock.now())
        entry = self.script[min(len(self.starts), len(self.script)) - 1]
        await anyio.sleep(self.start_s)
        if isinstance(entry, Exception):
            raise entry
        self.workers.append(entry(f"worker-{len(self.workers)}"))
        return self.workers[-1]

    def fleet(
        self,
        workers: int,
        slots_per_sandbox: int,
        restarts: RestartBudget | None = None,
        liveness: LivenessTimes | None = None,
        *,
        ends_when_spent: bool = False,
    ) -> ScriptedFleet:
        return ScriptedFleet(
            ScriptedPool(self.start, restarts=restarts, liveness=liveness),
            workers=workers,
            slots_per_sandbox=slots_per_sandbox,
            ends_when_spent=ends_when_spent,
            start_timeout_s=10,
            wait_timeout_s=30,
        )


def run(main: Callable[[], Awaitable[None]]) -> None:
    clock.run(main, virtual=True)


def silent(name: str) -> Worker:
    return Worker(name, answers=False)


async def play(host: FleetHost, seconds: float, ends: list[str], task: Task = TASK) -> None:
    """Play for a while; append the worker or the error to `ends`."""
    try:
        async with host.lease(task) as episode:
            start = await episode.reset()
            with anyio.move_on_after(seconds):
                while True:
                    await episode.step("go")
    except (SandboxLostError, SandboxStartError) as error:
        ends.append(f"{clock.now():g} {error.cause}")
    else:
        ends.append(start.observation.text)
