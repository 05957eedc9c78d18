"""A scripted episode behind the proxy: tests decide when its calls answer, and see what the proxy reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import anyio

from envkit.trainer_bridge.agents.messages import CallRefusedError, ModelRequest, Reply
from envkit.types import JSON


@dataclass
class ScriptedCall:
    """A call that answers once `answer` or `fail` has been called."""

    request: ModelRequest
    deliveries: list[tuple[int, int | None]] = field(default_factory=list)
    is_aborted: bool = False
    outcome: Sequence[Reply] | CallRefusedError | None = None
    _is_over: anyio.Event = field(default_factory=anyio.Event)

    def answer(self, *replies: Reply | str) -> None:
        self.outcome = [Reply(content=one) if isinstance(one, str) else one for one in replies]
        self._is_over.set()

    def fail(self, error: CallRefusedError) -> None:
        self.outcome = error
        self._is_over.set()

    async def replies(self) -> Sequence[Reply]:
        await self._is_over.wait()
        if isinstance(self.outcome, CallRefusedError):
            raise self.outcome
        assert self.outcome is not None
        return self.outcome

    def delivered(self, index: int = 0, characters: int | None = None) -> None:
        self.deliveries.append((index, characters))

    def abort(self) -> None:
        self.is_aborted = True
        self.fail(CallRefusedError("aborted", "sampling was stopped"))


@dataclass
class ScriptedCalls:
    """An episode.

    Attributes:
        script: The outcomes of its calls, in order: replies, or a refusal. A call without one waits for the test.
        calls: The calls that were started.
        refusal: Raised by every further operation.
    """

    script: list[Reply | str | Sequence[Reply | str] | CallRefusedError] = field(default_factory=list)
    calls: list[ScriptedCall] = field(default_factory=list)
    refusal: CallRefusedError | None = None
    actions: list[str] = field(default_factory=list)

    @property
    def request(self) -> ModelRequest:
        """The last request."""
        return self.calls[-1].request

    def start(self, request: ModelRequest) -> ScriptedCall:
        if self.refusal is not None:
            raise self.refusal
        call = ScriptedCall(request)
        self.calls.append(call)
        if self.script:
            outcome = self.script.pop(0)
            if isinstance(outcome, CallRefusedError):
                call.fail(outcome)
            elif isinstance(outcome, Reply | str):
                call.answer(*[outcome] * request.n)
            else:
                call.answer(*outcome)
        return call

    def count(self, request: ModelRequest) -> int:
        return sum(len(message.content) for message in request.messages)

    async def step(self, action: str) -> dict[str, JSON]:
        if self.refusal is not None:
            raise self.refusal
        self.actions.append(action)
        info: Mapping[str, JSON] = {}
        return {"observation": "moved", "reward": 1.0, "terminated": True, "truncated": False, "info": dict(info)}
