"""A host that plays concurrent episodes in this process.

Later episodes reuse the environments that only compute. An `AsyncEnv` is closed at the end of each episode, so that it
releases what it holds, such as a sandbox.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Self, TypeAlias

import anyio
import gymnasium

from envkit.env import AsyncEnv, AsyncEpisode, GymEpisode
from envkit.protocols import EnvHost, Episode
from envkit.types import Task

AnyEnv: TypeAlias = "gymnasium.Env[str, str] | AsyncEnv"
OpenEnv: TypeAlias = Callable[[str], AnyEnv]

_CLOSE_S = 60.0
"""Maximum seconds that an environment may take to close."""

_log = logging.getLogger(__name__)


class SlotHost(EnvHost):
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
                if healthy and not isinstance(env, AsyncEnv):
                    self._idle.setdefault(task.env_id, []).append(env)
                else:
                    await close_env(env, task.env_id)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for env_id, idle in self._idle.items():
            while idle:
                await close_env(idle.pop(), env_id)


async def close_env(env: AnyEnv, env_id: str) -> None:
    """Close an environment. An error of its `close` is only logged, because the episode is over by then."""
    try:
        if isinstance(env, AsyncEnv):
            with anyio.move_on_after(_CLOSE_S, shield=True) as scope:
                await env.close()
            if scope.cancelled_caught:
                _log.warning("%s: close was cancelled after %g s", env_id, _CLOSE_S)
        else:
            env.close()
    except (Exception, SystemExit):  # a bug of one environment must not end the run
        _log.warning("%s: close failed", env_id, exc_info=True)
