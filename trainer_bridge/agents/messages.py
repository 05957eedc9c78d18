"""What a foreign agent asks the policy and what it gets: chats in one normal form, whatever the HTTP API.

Two requests continue each other if the messages of the later one begin with those of the earlier one and its answer.
Clients do not send messages back as they were, so messages are compared in a normal form: tool calls without their ids,
arguments as JSON values and without those that equal their default, no thoughts, no difference between null, empty and
missing content, ``developer`` as ``system``, and text in several parts as one text.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

import anyio
from anyio.abc import TaskGroup

from envkit.protocols import Engine
from envkit.types import JSON, ToolSchema

MessageRole: TypeAlias = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class AgentToolCall:
    """A tool call in an assistant's message.

    Attributes:
        arguments: The JSON value of the arguments; the text itself if it is not JSON.
    """

    name: str
    arguments: JSON


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """A message of a chat, in the normal form.

    Attributes:
        content: The text, without thoughts; may be empty.
        calls: The tool calls of an assistant's message, in order.
        answers: Of a tool's result, the position of its call among the calls of the assistant's message before it.
    """

    role: MessageRole
    content: str
    calls: tuple[AgentToolCall, ...] = ()
    answers: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest:
    """One request of an agent to the policy.

    Attributes:
        messages: The chat, with system messages where the client put them.
        tools: The tools, in the format of OpenAI's chat completions.
        model: The model's name in the request. Any name means the policy.
        max_tokens: Maximum number of tokens that the client asks for; None if it names none.
        stop: Texts that end the answer, which does not contain them.
        n: Number of answers to sample.
        logprobs: Whether the answers need `Reply.tokens`.
        continues: Whether the answer goes on inside the last message, which is the assistant's.
        temperature: What the client wrote as temperature, unchecked; None for nothing. Episodes have one of their own.
        unused: Names of the request's fields that have no effect, such as ``temperature``.
    """

    messages: tuple[ChatMessage, ...]
    tools: tuple[ToolSchema, ...] = ()
    model: str = ""
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    n: int = 1
    logprobs: bool = False
    continues: bool = False
    temperature: JSON = None
    unused: tuple[str, ...] = ()

    @property
    def is_probe(self) -> bool:
        """Whether the client only tests whether the model answers. Its answer is never trained on."""
        return self.max_tokens == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """An answer of the policy, as the client reads it.

    Attributes:
        content: The text, without thoughts and tool calls.
        thought: The thoughts; empty if there are none.
        calls: The tool calls, in order; empty if the answer was cut before the end of its first call.
        finish: Why the answer ended: at a stop text or stop token, at the limit of tokens, or with tool calls.
        stop_text: The text among `ModelRequest.stop` that ended the answer; empty if none did.
        tokens: Text and log-probability in nats of each sampled token, if the request wants them.
        prompt_tokens: Number of tokens of the prompt.
        completion_tokens: Number of sampled tokens.
    """

    content: str
    thought: str = ""
    calls: tuple[AgentToolCall, ...] = ()
    finish: Literal["stop", "length", "tool_calls"] = "stop"
    stop_text: str = ""
    tokens: Sequence[tuple[str, float]] = field(default=(), repr=False)
    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass(slots=True, eq=False)
class RunningCall:
    """A request of an agent that the policy is answering.

    The sampling does not depend on the client's connection. Answers that are never reported as `delivered` are not
    trained on, and do not become part of a later prompt.

    Attributes:
        n: Number of answers; see `ModelRequest.n`.
        found: The answers so far, by index.
        sessions: Sessions of the engine that sample them.
        why_not: Why there is no answer; empty if there may be one.
        is_over: Set at its end.
    """

    engine: Engine
    tasks: TaskGroup
    n: int
    found: dict[int, Reply] = field(default_factory=dict)
    sessions: list[str] = field(default_factory=list)
    why_not: str = ""
    is_over: anyio.Event = field(default_factory=anyio.Event)

    async def sample(self, sample: Callable[[int], Coroutine[Any, Any, None]]) -> None:
        """Call `sample` with the index of each answer, at the same time."""
        try:
            async with anyio.create_task_group() as tasks:
                for index in range(self.n):
                    tasks.start_soon(sample, index)
        finally:
            self.is_over.set()

    async def replies(self) -> Sequence[Reply]:
        """Wait for the answers. Several callers may wait.

        Raises:
            CallRefusedError: There is no answer.
        """
        await self.is_over.wait()
        if self.why_not or len(self.found) < self.n:
            raise CallRefusedError("aborted", self.why_not or "the sampling was stopped")
        return [self.found[index] for index in range(self.n)]

    def delivered(self, index: int = 0, characters: int | None = None) -> None:
        """Report that the client received answer `index`: the whole of it, or `characters` of its content."""

    def abort(self) -> None:
        """Stop sampling; `replies` then raises `CallRefusedError`."""
        self.why_not = "the sampling was stopped"
        for session in self.sessions:
            self.tasks.start_soon(self.engine.abort, session)


class EpisodeCalls(Protocol):
    """An episode of a foreign agent, as a server of its requests sees it."""

    def start(self, request: ModelRequest) -> RunningCall:
        """Begin to answer a request. Requests may be in progress at the same time.

        Raises:
            CallRefusedError: The prompt and the answer exceed the context, the budget of the episode is used up, or the
                episode has ended.
        """
        ...

    def count(self, request: ModelRequest) -> int:
        """Return the number of tokens of the prompt; this costs no budget."""
        ...

    async def step(self, action: str) -> dict[str, JSON]:
        """Play an action in the environment, for an agent beside the sandbox.

        Returns:
            ``observation``, a text.

        Raises:
            CallRefusedError: The episode has ended.
        """
        ...


RefusalKind: TypeAlias = Literal["context", "budget", "ended", "aborted", "request"]


class CallRefusedError(Exception):
    """A request of an agent that gets no answer.

    Attributes:
        kind: Why: the prompt is too long (``context``), a limit of the episode is reached (``budget``), the episode is
            over (``ended``), sampling was stopped (``aborted``), or the request is wrong (``request``).
    """

    def __init__(self, kind: RefusalKind, why: str) -> None:
        super().__init__(why)
        self.kind = kind
