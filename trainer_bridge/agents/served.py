"""Calls to a model that belong to no episode, such as those of an agent that is evaluated; nothing is trained on."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field, replace
from functools import partial

import anyio
from anyio.abc import TaskGroup

from envkit.errors import EnvkitError
from envkit.protocols import Engine
from envkit.types import JSON, FinishReason, SamplingParams

from ..render.chat import ChatRenderer
from .conversation import CallPrompt, Conversation, reply_of
from .messages import CallRefusedError, EpisodeCalls, ModelRequest, RunningCall

AT_ONCE = 64
"""Maximum number of answers that are sampled at the same time; others wait."""


@dataclass(slots=True, eq=False)
class ServedModel(EpisodeCalls):
    """Answers calls with the temperature that the client asks for, or 1. Each prompt is rendered as a whole.

    Attributes:
        max_tokens: Maximum number of tokens of a prompt with its answer.
        turn_tokens: Maximum number of tokens of an answer. It is shorter if the prompt leaves less room.
        tasks: Runs the calls, until it is cancelled.
    """

    engine: Engine
    renderer: ChatRenderer
    max_tokens: int
    turn_tokens: int
    tasks: TaskGroup
    _limiter: anyio.CapacityLimiter = field(default_factory=lambda: anyio.CapacityLimiter(AT_ONCE))

    def start(self, request: ModelRequest) -> RunningCall:
        prompt = Conversation(self.renderer).prompt(request)
        room = self.max_tokens - len(prompt.ids())
        if room < 1:
            why = f"{len(prompt.ids())} tokens of the prompt leave no room for an answer in {self.max_tokens}"
            raise CallRefusedError("context", why)
        params = SamplingParams(
            temperature=_temperature_of(request),
            max_tokens=min(room, self.turn_tokens, request.max_tokens or self.turn_tokens),
            stop=self.renderer.stop,
        )
        sessions = [secrets.token_hex(8) for _ in range(request.n)]
        call = RunningCall(self.engine, self.tasks, request.n, sessions=sessions)
        self.tasks.start_soon(call.sample, partial(self._sample, call, prompt, params))
        return call

    def count(self, request: ModelRequest) -> int:
        return len(Conversation(self.renderer).prompt(request).ids())

    async def step(self, action: str) -> dict[str, JSON]:
        raise CallRefusedError("request", "this model belongs to no episode, which could play an action")

    async def _sample(self, call: RunningCall, prompt: CallPrompt, params: SamplingParams, index: int) -> None:
        session = call.sessions[index]
        async with self._limiter:
            if call.why_not:
                return
            try:
                seeded = replace(params, seed=secrets.randbits(63))
                completion = await self.engine.generate(prompt.ids(), seeded, session=session)
            except EnvkitError as error:
                call.why_not = str(error)
                return
            finally:
                self.engine.forget(session)
        if completion.finish is not FinishReason.ABORTED:
            call.found[index] = reply_of(self.renderer, prompt, completion)


def _temperature_of(request: ModelRequest) -> float:
    value = request.temperature
    if value is None:
        return 1.0
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise CallRefusedError("request", f"temperature must be a number of at least 0, not {value!r}")
    return value
