"""A player whose turns are the calls of a foreign agent: a program or function that calls the policy over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from copy import copy

from envkit import clock
from envkit.protocols import Engine, Player
from envkit.types import Reset, RolloutRequest

from ..render.chat import ChatRenderer
from ..rollout.episode import RolloutLimits
from .episode import Agent, AgentEpisode, AgentSettings, Selects, Stable


class AgentPlayer(AgentSettings, Player):
    """Plays episodes with a foreign agent. Use it as ``async with AgentPlayer.opened(...)``."""

    @classmethod
    @asynccontextmanager
    async def opened(
        cls,
        agent: Agent,
        engine: Engine,
        renderer: ChatRenderer,
        limits: RolloutLimits,
        selects: Selects = lambda request: True,
        stable: Stable = lambda message: message,
    ) -> AsyncIterator[AgentPlayer]:
        """Yield a player whose agents run until the end of the block at most."""
        player = cls(agent, engine, renderer, limits, selects, stable)
        async with clock.background_tasks() as tasks:
            player._tasks = tasks
            yield player

    def with_engine(self, engine: Engine) -> AgentPlayer:
        """Return the same player with other weights."""
        found = copy(self)
        found.engine = engine
        return found

    def begin(self, request: RolloutRequest, start: Reset) -> AgentEpisode:
        return AgentEpisode(self, request, start)
