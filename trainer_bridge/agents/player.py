"""A player whose turns are the calls of a foreign agent: a program or function that calls the policy over HTTP."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from copy import copy
from typing import Any, Protocol, TypeAlias

import anyio
from anyio.abc import TaskGroup

from envkit.protocols import Engine, Player
from envkit.types import Reset, RolloutRequest

from ..render.chat import ChatRenderer
from ..rollout.episode import RolloutLimits
from .episode import AgentEpisode
from .messages import ChatMessage, ModelRequest

Selects: TypeAlias = Callable[[ModelRequest], bool]
"""Whether a call is trained on."""
Stable: TypeAlias = Callable[[ChatMessage], ChatMessage]
"""Returns a message without what changes between calls."""


class Agent(Protocol):
    """A foreign agent."""

    async def run(self, task: AgentEpisode) -> None:
        """Work on a task until done. It is cancelled if the episode ends first.

        Raises:
            AgentEndedError: The agent ended by an error. The episode is graded nevertheless, if the agent has called
                the policy.
        """
        ...


class AgentPlayer(Player):
    """Plays episodes with a foreign agent. Use it as ``async with AgentPlayer.opened(...)``.

    Attributes:
        agent: The agent.
        engine: Samples the answers.
        renderer: Renders the chats.
        limits: Limits of an episode: `max_turns` calls, `max_tokens` of a prompt with its answer, `turn_tokens` of an
            answer, and `player_timeout_s` of the agent.
        selects: Chooses the calls to train on.
        stable: Removes from a message what changes between calls.
        unused: Number of requests by the name of a field that had no effect.
        failures: Number of episodes by the error that their agent ended with.
    """

    def __init__(
        self,
        agent: Agent,
        engine: Engine,
        renderer: ChatRenderer,
        limits: RolloutLimits,
        selects: Selects = lambda request: True,
        stable: Stable = lambda message: message,
    ) -> None:
        self.agent, self.engine, self.renderer, self.limits = agent, engine, renderer, limits
        self.selects, self.stable = selects, stable
        self.unused: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self._tasks: TaskGroup | None = None

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
        async with anyio.create_task_group() as tasks:
            player._tasks = tasks
            try:
                yield player
            finally:
                tasks.cancel_scope.cancel()

    def with_engine(self, engine: Engine) -> AgentPlayer:
        """Return the same player with other weights."""
        found = copy(self)
        found.engine = engine
        return found

    def begin(self, request: RolloutRequest, start: Reset) -> AgentEpisode:
        return AgentEpisode(self, request, start)

    def start_task(self, run: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a task in the background."""
        assert self._tasks is not None, "only in the block of `opened`"
        self._tasks.start_soon(run)
