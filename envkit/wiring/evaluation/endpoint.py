"""A player that asks an OpenAI-compatible endpoint; see `envkit.http.client.chat` for retries and errors.

If all tries of a request fail, the episode is void. An environment's tools are sent in the field ``tools``; the first
tool call of a reply is the action, as canonical JSON.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from envkit import clock
from envkit.config.parts import RendererSection
from envkit.errors import PlayerStoppedError
from envkit.http.client.chat import (
    API_KEY,
    Address,
    ChatClient,
    ChoiceReply,
    NoReplyError,
    RequestRefusedError,
    ToolCallReply,
    open_client,
)
from envkit.protocols import EpisodePlayer, Player
from envkit.trainer_bridge.rollout import RolloutLimits
from envkit.trainer_bridge.thoughts import without_thoughts
from envkit.trainer_bridge.tool_calls import as_call, canonical_call, hermes, join_prompts
from envkit.types import (
    Action,
    FinishReason,
    GenerationRecord,
    Observation,
    Reset,
    RolloutRequest,
    StopReason,
    ToolSchema,
)

_CALL_ID = "call_0"
"""Id of a tool call that the server gave none."""


@dataclass(frozen=True, slots=True)
class Endpoint(Player):
    """A player that asks a model behind an endpoint.

    Attributes:
        system: System prompt; None sends no prompt of our own.
        history: Number of most recent turns in a prompt, or ``"all"``.
        keeps_thoughts: Whether thoughts of earlier turns stay in the prompt.
    """

    client: ChatClient
    limits: RolloutLimits
    system: str | None = None
    history: int | Literal["all"] = "all"
    keeps_thoughts: bool = False

    def begin(self, request: RolloutRequest, start: Reset) -> EpisodePlayer:
        system = join_prompts(self.system, start.system)
        return _Chat(self, random.Random(request.seed), request.temperature, system, start.tools)

    async def complete(
        self,
        messages: list[dict[str, Any]],
        prompt: str = "",
        *,
        seed: int,
        temperature: float,
        tools: tuple[ToolSchema, ...] = (),
    ) -> tuple[ChoiceReply, GenerationRecord]:
        """Return the model's completion of the chat `messages`, and its record, in which `prompt` is what was new.

        Raises:
            PlayerStoppedError: All tries failed, or the server refuses this request.
            UsageError: The server rejects the first request, several requests in a row, or all requests.
            UnreachableError: The server is not reachable.
        """
        began = clock.precise()
        try:
            reply = await self.client.complete(
                messages, max_tokens=self.limits.turn_tokens, temperature=temperature, seed=seed, tools=tools
            )
        except RequestRefusedError as error:
            raise PlayerStoppedError(StopReason.REFUSED, str(error)) from error
        except NoReplyError as error:
            raise PlayerStoppedError(StopReason.NO_COMPLETION, str(error)) from error
        choice = reply.choices[0]
        content, thoughts = choice.message.content or "", choice.message.reasoning_content or choice.message.reasoning
        generation = GenerationRecord(
            prompt=prompt,
            completion=f"<think>{thoughts}</think>{content}" if thoughts else content,
            finish=FinishReason.LENGTH if choice.finish_reason == "length" else FinishReason.STOP,
            seconds=clock.precise() - began,
            usage=(reply.usage.prompt_tokens, reply.usage.completion_tokens) if reply.usage else (0, 0),
        )
        return choice, generation


@asynccontextmanager
async def open_endpoint(
    address: Address, limits: RolloutLimits, renderer: RendererSection, *, at_once: int, timeout_s: float = 600.0
) -> AsyncIterator[Endpoint]:
    """Open a player that asks the model at `address`, with the API key in ``OPENAI_API_KEY``.

    Up to `at_once` requests are made at once. One fails after `timeout_s` seconds.
    """
    key = os.environ.get(API_KEY)
    keeps_thoughts = "thinking" in renderer.model_fields_set and getattr(renderer, "thinking", "") == "keep"
    async with open_client(address, api_key=key, timeout_s=timeout_s, concurrency=at_once) as client:
        system = getattr(renderer, "system", None)
        yield Endpoint(client, limits, system, renderer.history, keeps_thoughts)


@dataclass(frozen=True, slots=True)
class _Turn:
    """An observation, the text of the answer to it, and the tool call of the answer if it has one."""

    observation: Observation
    answer: str
    call: ToolCallReply | None = None

    def messages(self, after: Observation) -> list[dict[str, Any]]:
        """Return the answer and `after` as messages. OpenAI's API requires a result after each call, and vice versa."""
        if self.call is None or after.role != "tool":
            answer = self.answer if self.call is None else self.answer + _action(self.call)
            return [{"role": "assistant", "content": answer}, {"role": "user", "content": after.text}]
        function = {"name": self.call.function.name, "arguments": self.call.function.arguments or "{}"}
        call = {"id": self.call.id or _CALL_ID, "type": "function", "function": function}
        return [
            {"role": "assistant", "content": self.answer, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": after.text},
        ]


@dataclass(slots=True)
class _Chat(EpisodePlayer):
    """One episode: a chat that grows by one observation and one answer per turn."""

    endpoint: Endpoint
    rng: random.Random
    temperature: float
    system: str | None
    tools: tuple[ToolSchema, ...]
    turns: list[_Turn] = field(default_factory=list)

    async def act(self, observation: Observation) -> Action:
        choice, generation = await self.endpoint.complete(
            self._messages(observation),
            observation.text,
            seed=self.rng.getrandbits(31),
            temperature=self.temperature,
            tools=self.tools,
        )
        completion, calls = generation.completion, choice.message.tool_calls
        spoken = without_thoughts(completion)
        call = calls[0] if calls and self.tools else None
        if call is not None and len(calls or ()) > 1:
            self.endpoint.client.note(
                f"{self.endpoint.client.address.model} calls several tools in one answer; only the first one runs (for "
                "one: --param parallel_tool_calls=false)"
            )
        if call is not None:
            action = _action(call)
            generation = msgspec.structs.replace(generation, completion=completion + action)
        else:
            action = (canonical_call(spoken, self.tools) if self.tools else None) or spoken
        self.turns.append(_Turn(observation, completion if self.endpoint.keeps_thoughts else spoken, call))
        return Action(action, generation=generation)

    def _messages(self, observation: Observation) -> list[dict[str, Any]]:
        limit = self.endpoint.history
        before = len(self.turns) if limit == "all" else min(len(self.turns), limit - 1)
        kept = self.turns[len(self.turns) - before :]
        seen = [*(turn.observation for turn in kept), observation]
        messages: list[dict[str, Any]] = [] if self.system is None else [{"role": "system", "content": self.system}]
        messages.append({"role": "user", "content": seen[0].text})
        for turn, after in zip(kept, seen[1:], strict=True):
            messages += turn.messages(after)
        return messages


def _action(call: ToolCallReply) -> str:
    """Return the call as canonical JSON, or as text for the environment to reject if its arguments are not valid."""
    name, arguments = call.function.name, call.function.arguments
    try:
        return as_call({"name": name, "arguments": arguments or "{}"})
    except (ValueError, RecursionError):
        return hermes(f'{{"name": {json.dumps(name)}, "arguments": {arguments}}}')
