"""Many episodes in this process: slots, each an environment that is used again for the next episode."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Self, TypeAlias

import anyio
import gymnasium

from envkit.env import AsyncEnv, AsyncEpisode, GymEpisode
from envkit.protocols import Episode
from envkit.types import Task

World: TypeAlias = "gymnasium.Env[str, str] | AsyncEnv"
OpenWorld: TypeAlias = Callable[[str], World]


class SlotHost:
    """Plays up to `capacity` episodes at once in this process; satisfies `envkit.protocols.EnvHost`.

    Args:
        open_world: Makes a world from an environment's id; raises `UnknownEnvError` for an unknown one.
        capacity: Number of episodes at once.
    """

    def __init__(self, open_world: OpenWorld, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        self._open_world = open_world
        self._capacity = capacity
        self._places = anyio.Semaphore(capacity, max_value=capacity, fast_acquire=True)
        self._idle: dict[str, list[World]] = {}

    @property
    def capacity(self) -> int:
        return self._capacity

    @asynccontextmanager
    async def lease(self, task: Task) -> AsyncIterator[Episode]:
        async with self._places:
            idle = self._idle.get(task.env_id)
            world = idle.pop() if idle else self._open_world(task.env_id)
            healthy = False
            try:
                yield AsyncEpisode(world, task) if isinstance(world, AsyncEnv) else GymEpisode(world, task)
                healthy = True
            finally:
                if healthy:
                    self._idle.setdefault(task.env_id, []).append(world)
                else:
                    await _close(world)

    async def aclose(self) -> None:
        """Close the worlds that are kept for the next episode; safe to repeat."""
        for idle in self._idle.values():
            while idle:
                await _close(idle.pop())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


async def _close(world: Any) -> None:
    if isinstance(world, AsyncEnv):
        with anyio.CancelScope(shield=True):
            await world.close()
    else:
        world.close()
