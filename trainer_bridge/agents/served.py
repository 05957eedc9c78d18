"""Calls to a model that belong to no episode, such as those of an agent that is evaluated; nothing is trained on."""

from __future__ import annotations

import secrets
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from envkit.protocols import Engine
from envkit.types import JSON, Observation, Reset, RolloutRequest, Task

from ..render.chat import ChatRenderer
from ..rollout.episode import RolloutLimits
from .episode import AgentEpisode
from .messages import CallRefusedError, EpisodeCalls, ModelRequest, Reply, RunningCall
from .player import AgentPlayer


class _NoAgent:
    async def run(self, task: AgentEpisode) -> None:
        """Never called: the agents are clients elsewhere."""


@dataclass(slots=True, eq=False)
class _ServedCall(RunningCall):
    """A call, with an episode of its own."""

    episode: AgentEpisode
    running: RunningCall
    answers: Sequence[Reply] = ()

    async def replies(self) -> Sequence[Reply]:
        try:
            self.answers = await self.running.replies()
        except CallRefusedError as refusal:
            if not self.answers:  # those that another caller waited for, too
                raise CallRefusedError(refusal.kind, str(self.episode.error or refusal)) from None
        finally:
            self.episode.end()
        return self.answers

    def delivered(self, index: int = 0, characters: int | None = None) -> None:
        """Do nothing: no later prompt depends on what the client received."""

    def abort(self) -> None:
        self.running.abort()


class ServedModel(EpisodeCalls):
    """Answers calls with the temperature that the client asks for, or 1. Each prompt is rendered as a whole."""

    def __init__(self, player: AgentPlayer) -> None:
        self._player = player

    @classmethod
    @asynccontextmanager
    async def opened(
        cls, engine: Engine, renderer: ChatRenderer, *, max_tokens: int, turn_tokens: int
    ) -> AsyncIterator[ServedModel]:
        """Yield a model whose calls run until the end of the block at most.

        Args:
            engine: Samples the answers.
            renderer: Renders the chats.
            max_tokens: Maximum number of tokens of a prompt with its answer.
            turn_tokens: Maximum number of tokens of an answer.
        """
        limits = RolloutLimits(max_turns=sys.maxsize, max_tokens=max_tokens, turn_tokens=turn_tokens)
        async with AgentPlayer.opened(_NoAgent(), engine, renderer, limits) as player:
            yield cls(player)

    def start(self, request: ModelRequest) -> RunningCall:
        episode = self._episode(request)
        return _ServedCall(episode, episode.start(request))

    def count(self, request: ModelRequest) -> int:
        return self._episode(request).count(request)

    async def step(self, action: str) -> dict[str, JSON]:
        raise CallRefusedError("request", "this model belongs to no episode, which could play an action")

    def _episode(self, request: ModelRequest) -> AgentEpisode:
        name = secrets.token_hex(8)
        temperature = 1.0 if request.temperature is None else request.temperature
        asked = RolloutRequest(name, Task("", 0), 0, seed=secrets.randbits(63), temperature=temperature)
        return AgentEpisode(self._player, asked, Reset(Observation(""), {}))
