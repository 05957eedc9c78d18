"""What the HTTP APIs of language models share: a request in one normal form, and the answer that goes back.

A dialect is a set of functions, one module each: `openai_chat`, `responses` and `anthropic_messages`. A body that a
dialect cannot read raises a `CallRefusedError` of the kind ``request``, which names the field.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple, TypeAlias, TypeVar

import msgspec

from envkit.types import JSON

from ..thoughts import END_THINK, THINK, without_thoughts
from .messages import AgentToolCall, CallRefusedError, ChatMessage, MessageRole, ModelRequest, Reply

Body: TypeAlias = Mapping[str, Any]
Positive: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]
T = TypeVar("T")

PIECE_CHARACTERS = 256
"""Maximum characters of content in one event of a stream."""

_ROLES: Mapping[str, MessageRole] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
}
_TEXTS = frozenset(("text", "input_text", "output_text"))


@dataclass(frozen=True, slots=True)
class Answer:
    """The answers to a request, and what a dialect needs to write them. Equal answers are written as equal bytes.

    Attributes:
        id: Unique text, from which a dialect makes the ids of the response and of its tool calls.
        created_s: Unix time of the request in whole seconds.
        body: The client's request.
        replies: One reply for each of `ModelRequest.n`.
    """

    id: str
    created_s: int
    body: Body
    replies: Sequence[Reply]

    @property
    def model(self) -> str:
        """The model's name in the request, which the response repeats."""
        return str(self.body.get("model") or "policy")

    @property
    def num_tokens(self) -> tuple[int, int]:
        """Number of tokens of the prompt, and of all replies together."""
        return self.replies[0].prompt_tokens, sum(reply.completion_tokens for reply in self.replies)


class Event(NamedTuple):
    """A part of a streamed answer: its bytes, and how many characters of which reply's content they contain."""

    data: bytes
    reply: int = 0
    characters: int = 0


@dataclass(frozen=True, slots=True)
class Dialect:
    """How an HTTP API writes requests and answers.

    Attributes:
        read: Converts the body of a request.
        write: Returns the body of an answer.
        stream: Yields an answer as server-sent events.
        error: Returns the body of an error, from its status, its code and its message.
        keep_alive: Bytes to send in a stream while the answer is not there yet.
        too_long: Words by which clients recognise a prompt that exceeds the context.
    """

    read: Callable[[Body], ModelRequest]
    write: Callable[[Answer], Body]
    stream: Callable[[Answer], Iterator[Event]]
    error: Callable[[int, str, str], Body]
    keep_alive: bytes = b": keep-alive\n\n"
    too_long: str = "this model's maximum context length is exceeded"


class Chat:
    """The messages of a request, converted to the normal form one after another.

    The parts of a text are joined by line breaks, except those of an assistant's text, which was one text when it was
    sampled.
    """

    def __init__(self) -> None:
        self.messages: list[ChatMessage] = []
        self._unanswered: dict[int, object] = {}  # ids of the last calls, by position

    def add(self, role: str, content: object) -> None:
        """Add a message.

        Raises:
            CallRefusedError: The role is unknown, or the content is not text.
        """
        if role not in _ROLES:
            raise refused(f"messages of the role {role!r} are not supported")
        text = text_of(content, "" if role == "assistant" else "\n")
        if role == "assistant":
            self._unanswered = {}
            text = without_thoughts(text) if THINK in text or END_THINK in text else text
        self.messages.append(ChatMessage(_ROLES[role], text))

    def add_call(self, id: object, name: object, arguments: object) -> None:
        """Add a tool call to the last message, or to a new one if the last one is not the assistant's."""
        if not self.messages or self.messages[-1].role != "assistant":
            self.add("assistant", None)
        last = self.messages[-1]
        self._unanswered[len(last.calls)] = id
        self.messages[-1] = replace(last, calls=(*last.calls, AgentToolCall(str(name), _arguments(arguments))))

    def add_result(self, id: object, content: object) -> None:
        """Add the result of the call `id`; if there is no such call, that of the first call without a result."""
        found = [position for position, one in self._unanswered.items() if one == id]
        position = next(iter(found or self._unanswered), 0)
        self._unanswered.pop(position, None)
        self.messages.append(ChatMessage("tool", text_of(content), answers=position))

    def end_inside(self, content: object) -> None:
        """Let the answer go on inside the last message, whose `content` is then kept to the byte.

        Raises:
            CallRefusedError: The answer cannot go on there.
        """
        last = self.messages[-1]
        if last.role != "assistant" or last.calls:
            raise refused("the answer can only go on inside a last message of the assistant without tool calls")
        self.messages[-1] = replace(last, content=text_of(content, ""))

    def request(
        self,
        body: Body,
        kind: type[msgspec.Struct],
        functions: Sequence[tuple[object, Body | None]],
        max_tokens: int | None,
        **fields: Any,
    ) -> ModelRequest:
        """Return the request with these messages. Of `body`, only the fields of `kind` have an effect.

        `functions` are the type and function of each tool; None for a tool that only the provider of the API can run.

        Raises:
            CallRefusedError: A function has no name.
        """
        used = {*kind.__struct_fields__, "model", "stream"}
        if any(function is not None and not isinstance(function.get("name"), str) for _, function in functions):
            raise refused("tools: a function has no name")
        names = sorted(name for name, value in body.items() if name not in used and value not in (None, "auto"))
        return ModelRequest(
            messages=tuple(self.messages),
            tools=tuple({"type": "function", "function": {**one}} for _, one in functions if one is not None),
            model=str(body.get("model") or ""),
            max_tokens=max_tokens,
            temperature=body.get("temperature"),
            unused=(*names, *(f"tools.{kind}" for kind, one in functions if one is None)),
            **fields,
        )


def text_of(content: object, separator: str = "\n") -> str:
    """Return the text of a message's content: a text, a list of parts, or nothing.

    Raises:
        CallRefusedError: It has a part that is not text, such as an image.
    """
    if content is None or isinstance(content, str):
        return content or ""
    texts: list[str] = []
    for part in content if isinstance(content, list) else [content]:
        fields: Body = part if isinstance(part, dict) else {"type": "text", "text": part}
        if fields.get("type") not in _TEXTS or not isinstance(fields.get("text"), str):
            raise refused(f"content of the type {fields.get('type')!r} is not supported: the policy reads text only")
        texts.append(fields["text"])
    return separator.join(texts)


def _arguments(arguments: Any) -> JSON:
    """Return the arguments of a call as a JSON value: an object for nothing, the text itself if it is not JSON."""
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        value: JSON = msgspec.json.decode(arguments or "{}")
    except (msgspec.MsgspecError, RecursionError):
        return arguments
    return arguments if isinstance(value, str) else value


def arguments_text(arguments: JSON) -> str:
    """Return the arguments of a call as clients read them."""
    return arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()


def parsed(body: object, kind: type[T]) -> T:
    """Return `body` as a `kind` of msgspec.

    Raises:
        CallRefusedError: A field is missing or wrong; the message says which.
    """
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        raise refused(f"invalid request: {error}") from None


def pieces(text: str) -> Iterator[str]:
    """Yield `text` in pieces of at most `PIECE_CHARACTERS`."""
    yield from (text[start : start + PIECE_CHARACTERS] for start in range(0, len(text), PIECE_CHARACTERS))


def sse(data: object, event: str | None = None) -> bytes:
    """Return a server-sent event with `data` as JSON."""
    prefix = b"" if event is None else f"event: {event}\n".encode()
    return prefix + b"data: " + msgspec.json.encode(data) + b"\n\n"


def refused(why: str) -> CallRefusedError:
    return CallRefusedError("request", why)
