"""The tree of an agent's calls to the policy: which call's tokens a prompt continues.

A request continues a call if its tools are the same and its messages begin with those of the call and the call's
answer. Its prompt then begins with the tokens of that call, as they were read and sampled. Otherwise, or if the chat
template renders the earlier messages differently, the prompt is encoded as a whole and starts a new sample. So forks,
parallel calls, retries, sub-agents and summaries become branches and roots, and nothing that a client rewrote or quoted
is ever taken for a sampled token.

An answer may also go on: text that the client appended to it, as agents do that write the result of a command into the
assistant's message, follows its tokens as context. If a client read only the beginning of an answer, only the tokens of
this beginning are continued.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from envkit.errors import UsageError
from envkit.types import JSON, Completion, FinishReason, ToolSchema

from ..render.chat import ChatRenderer
from .messages import AgentToolCall, CallRefusedError, ChatMessage, ModelRequest, Reply

UNREAD = -1
"""The client received nothing of an answer."""


@dataclass(slots=True, eq=False)
class Call:
    """A call of the agent that was answered.

    Attributes:
        read: Number of characters of the reply's content that the client received, or `UNREAD`; None means all.
        number: Number of its turn in the episode; None until it is recorded.
        is_continued: Whether another call continues its sample.
    """

    prompt: CallPrompt
    completion: Completion
    reply: Reply
    read: int | None = UNREAD
    number: int | None = None
    is_continued: bool = False

    @property
    def content(self) -> str:
        """The text of the assistant's message, with what the client had begun."""
        return self.prompt.begun + self.reply.content

    def answer_ids(self, count: int) -> list[int]:
        """Return the tokens of the assistant's message up to the first `count` tokens of the completion."""
        return [*self.prompt.begun_ids, *self.completion.token_ids[:count].tolist()]


@dataclass(frozen=True, slots=True, eq=False)
class CallPrompt:
    """The prompt of a call.

    Attributes:
        new_ids: The whole prompt, or its tokens after those of `parent`.
        parent: The call that it continues; None if it starts a sample.
        keeps: Number of the parent's completion tokens in the prompt.
        begun_ids: Tokens at its end that belong to the answer, because the client has begun it.
    """

    request: ModelRequest
    new_ids: tuple[int, ...]
    parent: Call | None = None
    keeps: int = 0
    begun_ids: tuple[int, ...] = ()

    @property
    def begun(self) -> str:
        """The beginning of the answer; empty if the client has not begun it."""
        return self.request.messages[-1].content if self.request.continues else ""

    def ids(self) -> list[int]:
        """Return all its tokens."""
        parts, prompt = [self.new_ids], self
        while (call := prompt.parent) is not None:
            parts += [tuple(call.completion.token_ids[: prompt.keeps].tolist()), call.prompt.new_ids]
            prompt = call.prompt
        return [token for part in reversed(parts) for token in part]


@dataclass(slots=True)
class Conversation:
    """All calls of one episode."""

    renderer: ChatRenderer
    _calls: dict[bytes, list[Call]] = field(default_factory=dict)

    def prompt(self, request: ModelRequest) -> CallPrompt:
        """Return the prompt for a request.

        Raises:
            CallRefusedError: The chat template rejects the messages.
        """
        try:
            return self._prompt(request)
        except UsageError as error:
            raise CallRefusedError("request", str(error)) from error

    def _prompt(self, request: ModelRequest) -> CallPrompt:
        renderer, messages = self.renderer.for_tools(request.tools), request.messages
        keys = [*_keys(request.tools, messages)]
        for at in range(len(messages) - 1, -1, -1):
            if messages[at].role == "assistant":
                for call in reversed(self._calls.get(keys[at], ())):
                    if (found := _continued(renderer, call, request, at)) is not None:
                        return found
        if not request.continues:
            return CallPrompt(request, renderer.chat(messages))
        begun = messages[-1].content
        return CallPrompt(request, renderer.chat(messages[:-1], begun), begun_ids=renderer.plain(begun))

    def add(self, call: Call) -> None:
        """Let later requests continue a call."""
        request = call.prompt.request
        *_, before, key = b"", *_keys(request.tools, request.messages)
        self._calls.setdefault(before if request.continues else key, []).append(call)


def reply_of(renderer: ChatRenderer, prompt: CallPrompt, completion: Completion) -> Reply:
    """Return what the client reads of a completion."""
    request, ids = prompt.request, completion.token_ids.tolist()
    content, thought, calls = renderer.for_tools(request.tools).read([*prompt.begun_ids, *ids])
    content = content[len(prompt.begun) :]
    stop_text = _stop_of(request, content)
    if stop_text:
        content, calls = content[: content.index(stop_text)], []
    is_cut = completion.finish is FinishReason.LENGTH and not stop_text
    logprobs = zip(ids, completion.logprobs.tolist(), strict=True) if request.logprobs else ()
    return Reply(
        content=content,
        thought=thought,
        calls=tuple(AgentToolCall(one["name"], one["arguments"]) for one in map(json.loads, calls)),
        finish="length" if is_cut else "tool_calls" if calls else "stop",
        stop_text=stop_text,
        tokens=[(renderer.text([token]), logprob) for token, logprob in logprobs],
        prompt_tokens=len(prompt.ids()),
        completion_tokens=len(ids),
    )


def trained_part(renderer: ChatRenderer, call: Call, *, is_selected: bool) -> tuple[int | None, str]:
    """Return how many first tokens of a call are trained on (None: all), and why the others are not."""
    request = call.prompt.request
    renderer = renderer.for_tools(request.tools)
    if call.completion.finish is FinishReason.ABORTED:
        return 0, "aborted"
    if call.read == UNREAD:
        return 0, "unread"
    if request.is_probe:
        return 0, "probe"
    if not is_selected:
        return 0, "not_selected"
    if call.read is not None:
        return kept(renderer, call, call.content[: len(call.prompt.begun) + call.read]), "unread"
    if call.reply.stop_text:
        return kept(renderer, call, call.content + call.reply.stop_text), "stop"
    return None, ""


def kept(renderer: ChatRenderer, call: Call, text: str) -> int:
    """Return how many first tokens of a completion show no more than `text` of the assistant's message."""
    ids = call.completion.token_ids.tolist()
    while ids and ids[-1] in renderer.stop:
        ids.pop()

    def spoken(count: int) -> str:
        return renderer.read(call.answer_ids(count))[0]

    low, high = 0, len(ids)
    while low < high:  # more tokens show more text; a character of several tokens may be incomplete
        middle = (low + high + 1) // 2
        fits = text.startswith(spoken(middle).rstrip(_INCOMPLETE))
        low, high = (middle, high) if fits else (low, middle - 1)
    while low and not text.startswith(spoken(low)):
        low -= 1
    return low


def _continued(renderer: ChatRenderer, call: Call, request: ModelRequest, at: int) -> CallPrompt | None:
    """Return the prompt of a request whose message `at` may be the answer of `call`; None if it is not."""
    message, after = request.messages[at], request.messages[at + 1 :]
    goes_on = request.continues and not after
    if message.calls != call.reply.calls:
        defaults = _defaults_of(request.tools)
        if _compared(message.calls, defaults) != _compared(call.reply.calls, defaults):
            return None
    keeps = len(call.completion.token_ids)
    is_whole = call.read is None and message.content.strip() == call.content.strip() and not goes_on
    if not is_whole or renderer.read(call.answer_ids(keeps))[0].strip() != call.content.strip():
        is_longer = call.read is None and message.content.startswith(call.content)
        is_cut = bool(message.content) and call.content[: _end_of(call)].startswith(message.content)
        if not (is_whole or is_longer or is_cut):
            return None
        keeps = kept(renderer, call, message.content)
    answer = call.answer_ids(keeps)
    appended: tuple[int, ...] = ()
    if not is_whole:
        appended = renderer.plain(message.content[len(renderer.read(answer)[0]) :])
    if goes_on:
        return CallPrompt(request, appended, call, keeps, (*answer, *appended))
    frame = renderer.between(request.messages[: at + 1], [*answer, *appended], after)
    return None if frame is None else CallPrompt(request, (*appended, *frame), call, keeps)


def _stop_of(request: ModelRequest, content: str) -> str:
    """Return the text that stops an answer first; empty if none does."""
    found = [(place, text) for text in request.stop if text and (place := content.find(text)) >= 0]
    return min(found)[1] if found else ""


def _end_of(call: Call) -> int | None:
    """Return where the part of the assistant's message ends that the client received; None if it received all."""
    if call.read is None:
        return None
    return 0 if call.read == UNREAD else len(call.prompt.begun) + call.read


def _keys(tools: Sequence[ToolSchema], messages: Sequence[ChatMessage]) -> Iterator[bytes]:
    """Yield a hash of the tools and the messages before each message, and then of all."""
    found = blake2b(json.dumps(tools, sort_keys=True).encode(), digest_size=16)
    yield found.digest()
    defaults = _defaults_of(tools)
    for one in messages:
        content = one.content.strip() if one.role == "assistant" else one.content
        known = [one.role, content, _compared(one.calls, defaults), one.answers]
        found.update(json.dumps(known, sort_keys=True).encode("utf-8", "replace"))
        yield found.digest()


def _defaults_of(tools: Sequence[ToolSchema]) -> dict[str, dict[str, str]]:
    """Return the defaults of the arguments of each tool, as JSON."""
    found = {}
    for function in (tool["function"] for tool in tools):
        schema = function.get("parameters")
        properties = schema.get("properties") if isinstance(schema, dict) else None
        given = properties.items() if isinstance(properties, dict) else ()
        known = {name: one["default"] for name, one in given if isinstance(one, dict) and "default" in one}
        found[function["name"]] = {name: json.dumps(value, sort_keys=True) for name, value in known.items()}
    return found


def _compared(calls: Sequence[AgentToolCall], defaults: Mapping[str, Mapping[str, str]]) -> list[tuple[str, JSON]]:
    """Return calls without the arguments that equal the default of the tool, which some clients add."""
    found: list[tuple[str, JSON]] = []
    for call in calls:
        known, arguments = defaults.get(call.name) or {}, call.arguments
        if known and isinstance(arguments, dict):
            items = arguments.items()
            arguments = {name: one for name, one in items if known.get(name) != json.dumps(one, sort_keys=True)}
        found.append((call.name, arguments))
    return found


_INCOMPLETE = "\ufffd"
"""Shows tokens that are only a part of a character."""
