"""A host that plays concurrent episodes in this process. Later episodes reuse the environments of ended ones."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Self, TypeAlias

import anyio
import gymnasium

from envkit.env import AsyncEnv, AsyncEpisode, GymEpisode
from envkit.protocols import Episode
from envkit.types import Task

AnyEnv: TypeAlias = "gymnasium.Env[str, str] | AsyncEnv"
OpenEnv: TypeAlias = Callable[[str], AnyEnv]


class SlotHost:
    """Plays episodes in this process; see `envkit.protocols.EnvHost`.

    Args:
        open_env: Creates the environment with the id that it gets; raises `UnknownEnvError` for an unknown id.
        capacity: Maximum number of concurrent episodes.
    """

    def __init__(self, open_env: OpenEnv, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        self._open_env = open_env
        self._capacity = capacity
        self._slots = anyio.Semaphore(capacity, max_value=capacity, fast_acquire=True)
        self._idle: dict[str, list[AnyEnv]] = {}

    @property
    def capacity(self) -> int:
        return self._capacity

    @asynccontextmanager
    async def lease(self, task: Task) -> AsyncIterator[Episode]:
        async with self._slots:
            idle = self._idle.get(task.env_id)
            env = idle.pop() if idle else self._open_env(task.env_id)
            healthy = False
            try:
                yield AsyncEpisode(env, task) if isinstance(env, AsyncEnv) else GymEpisode(env, task)
                healthy = True
            finally:
                if healthy:
                    self._idle.setdefault(task.env_id, []).append(env)
                else:
                    await _close(env)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for idle in self._idle.values():
            while idle:
                await _close(idle.pop())


async def _close(env: Any) -> None:
    if isinstance(env, AsyncEnv):
        with anyio.CancelScope(shield=True):
            await env.close()
    else:
        env.close()
