"""How hard levels are: the moves of a shortest solution. Worlds may tell it at reset, ``info["level"]["shortest"]``."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from envkit.protocols import EnvHost, Episode
from envkit.types import Info, Reset, Step, Task


def shortest_of(info: Info) -> int | None:
    """Return the moves of a level's shortest solution; None where a reset's `info` does not tell them."""
    level = info.get("level")
    shortest = level.get("shortest") if isinstance(level, dict) else None
    return shortest if isinstance(shortest, int) and not isinstance(shortest, bool) else None


class NotingHost:
    """Lends the episodes of another host and notes how hard their levels are; satisfies `envkit.protocols.EnvHost`."""

    def __init__(self, host: EnvHost) -> None:
        self._host = host
        self._shortest: dict[str, int] = {}

    @property
    def capacity(self) -> int:
        return self._host.capacity

    @asynccontextmanager
    async def lease(self, task: Task) -> AsyncIterator[Episode]:
        async with self._host.lease(task) as episode:
            yield _NotedEpisode(episode, lambda info: self._note(task, info))

    def shortest(self, task: Task) -> int | None:
        """Return the moves of the shortest solution of `task`'s level; None before its reset, or if not told."""
        return self._shortest.get(task.key)

    def _note(self, task: Task, info: Info) -> None:
        shortest = shortest_of(info)
        if shortest is not None:
            self._shortest[task.key] = shortest


class _NotedEpisode:
    def __init__(self, episode: Episode, note: Callable[[Info], None]) -> None:
        self._episode = episode
        self._note = note

    async def reset(self) -> Reset:
        start = await self._episode.reset()
        self._note(start.info)
        return start

    async def step(self, action: str) -> Step:
        return await self._episode.step(action)
