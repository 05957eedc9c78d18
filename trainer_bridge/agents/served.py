"""Calls to a model that belong to no episode, such as those of an agent that is evaluated; nothing is trained on."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import anyio
from anyio.abc import TaskGroup

from envkit import clock
from envkit.errors import EnvkitError, UsageError
from envkit.protocols import Engine
from envkit.types import JSON, FinishReason, SamplingParams

from ..render.chat import ChatRenderer
from .conversation import CallPrompt, Conversation, reply_of
from .messages import CallRefusedError, EpisodeCalls, ModelRequest, Reply, RunningCall

AT_ONCE = 64
"""Maximum number of answers that are sampled at the same time; others wait."""


@dataclass(slots=True, eq=False)
class _ServedCall(RunningCall):
    """A call. Its answers are sampled by a task, so that clients may come and go."""

    sessions: list[str]
    engine: Engine
    tasks: TaskGroup
    found: dict[int, Reply] = field(default_factory=dict)
    why_not: str = ""
    is_over: anyio.Event = field(default_factory=anyio.Event)

    async def replies(self) -> Sequence[Reply]:
        await self.is_over.wait()
        if len(self.found) < len(self.sessions):
            raise CallRefusedError("aborted", self.why_not or "the sampling was stopped")
        return [self.found[index] for index in range(len(self.sessions))]

    def delivered(self, index: int = 0, characters: int | None = None) -> None:
        """Do nothing: no later prompt depends on what the client received."""

    def abort(self) -> None:
        self.why_not = "the sampling was stopped"
        for session in self.sessions:
            self.tasks.start_soon(self.engine.abort, session)


class ServedModel(EpisodeCalls):
    """Answers calls with the temperature that the client asks for, or 1. Each prompt is rendered as a whole.

    Use it as ``async with ServedModel.opened(...)``.
    """

    def __init__(self, engine: Engine, renderer: ChatRenderer, max_tokens: int, turn_tokens: int, tasks: TaskGroup):
        self._engine, self._renderer, self._tasks = engine, renderer, tasks
        self._max_tokens, self._turn_tokens = max_tokens, turn_tokens
        self._limiter = anyio.CapacityLimiter(AT_ONCE)

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
            turn_tokens: Maximum number of tokens of an answer. It is shorter if the prompt leaves less room.
        """
        async with clock.background_tasks() as tasks:
            yield cls(engine, renderer, max_tokens, turn_tokens, tasks)

    def start(self, request: ModelRequest) -> RunningCall:
        prompt = self._prompt(request)
        room = self._max_tokens - len(prompt.ids())
        if room < 1:
            why = f"{len(prompt.ids())} tokens of the prompt leave no room for an answer in {self._max_tokens}"
            raise CallRefusedError("context", why)
        params = SamplingParams(
            temperature=_temperature_of(request),
            max_tokens=min(room, self._turn_tokens, request.max_tokens or self._turn_tokens),
            stop=self._renderer.stop,
        )
        call = _ServedCall([secrets.token_hex(8) for _ in range(request.n)], self._engine, self._tasks)
        self._tasks.start_soon(self._answer, call, prompt, params)
        return call

    def count(self, request: ModelRequest) -> int:
        return len(self._prompt(request).ids())

    async def step(self, action: str) -> dict[str, JSON]:
        raise CallRefusedError("request", "this model belongs to no episode, which could play an action")

    def _prompt(self, request: ModelRequest) -> CallPrompt:
        try:
            return Conversation(self._renderer).prompt(request)
        except UsageError as error:
            raise CallRefusedError("request", str(error)) from error

    async def _answer(self, call: _ServedCall, prompt: CallPrompt, params: SamplingParams) -> None:
        try:
            async with anyio.create_task_group() as tasks:
                for index in range(len(call.sessions)):
                    tasks.start_soon(self._sample, call, index, prompt, params)
        finally:
            call.is_over.set()

    async def _sample(self, call: _ServedCall, index: int, prompt: CallPrompt, params: SamplingParams) -> None:
        session = call.sessions[index]
        async with self._limiter:
            if call.why_not:
                return
            try:
                seeded = replace(params, seed=secrets.randbits(63))
                completion = await self._engine.generate(prompt.ids(), seeded, session=session)
            except EnvkitError as error:
                call.why_not = str(error)
                return
            finally:
                self._engine.forget(session)
        if completion.finish is not FinishReason.ABORTED:
            call.found[index] = reply_of(self._renderer, prompt, completion)


def _temperature_of(request: ModelRequest) -> float:
    value = request.temperature
    if value is None:
        return 1.0
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise CallRefusedError("request", f"temperature must be a number of at least 0, not {value!r}")
    return value
