"""Boxes whose worlds repeat all that was said to them, so that one can be told from another and from itself rebuilt."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio

from envkit.errors import UnreachableError
from envkit.fleet import FleetHost
from envkit.protocols import ResumableEpisode
from envkit.restarts import RestartBudget
from envkit.types import Cause, Observation, Reset, Step, Task
from tests.causes import cause

TASK = Task("Echo-v0", 3)
PLENTY = RestartBudget(restarts=10**6, first_delay_s=0.1, longest_delay_s=1.0)


class Box:
    """A sandbox, its server and the server's client in one; its worlds repeat all that was said to them."""

    capacity = 99

    def __init__(self, name: str, *, accent: str = "", dies_after: int | None = None, is_dying: bool = False) -> None:
        self.id = name
        self.accent = accent
        self.dies_after = dies_after
        self.is_dying = is_dying
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

    async def connect(self, name: str, /) -> socket.socket:
        raise NotImplementedError

    async def health(self) -> None:
        self._check()

    async def heartbeat(self) -> None:
        self._check()

    @asynccontextmanager
    async def lease(self, task: Task, *, id: str | None = None) -> AsyncIterator[ResumableEpisode]:
        if self.is_dying:
            self.die("killed by signal 9")
        self._check()
        yield Echo(self, task)

    async def answer(self) -> None:
        """Take a moment, or die of the call."""
        await anyio.sleep(0.01)
        if self.calls == self.dies_after:
            self.die("killed by signal 9")
        self.calls += 1
        self._check()

    def _check(self) -> None:
        if self.died.is_set():
            raise UnreachableError("connection refused")


class Echo:
    turn = 0

    def __init__(self, box: Box, task: Task) -> None:
        self.box = box
        self.said = [str(task.seed)]

    async def reset(self) -> Reset:
        await self.box.answer()
        return Reset(Observation(" ".join(self.said)), {})

    async def step(self, action: str) -> Step:
        await self.box.answer()
        self.said.append(action + self.box.accent)
        reward = float("nan") if action == "nothing" else float(len(self.said))
        return Step(Observation(" ".join(self.said)), reward, len(self.said) > 8, False, {"box": self.box.id})

    async def repeat_step(self, action: str) -> Step:
        raise NotImplementedError


@asynccontextmanager
async def connect(box: object) -> AsyncIterator[Box]:
    assert isinstance(box, Box)
    yield box


def fleet_of(*boxes: Box, at_once: int = 1, slots_per_sandbox: int = 1, is_replayable: bool = True) -> FleetHost:
    queue = list(boxes)

    async def start() -> Box:
        return queue.pop(0)

    return FleetHost(
        start,
        connect,
        workers=at_once,
        slots_per_sandbox=slots_per_sandbox,
        restarts=PLENTY,
        replayable=lambda env_id: is_replayable and env_id == TASK.env_id,
    )
