"""Anthropic's messages API. A request whose last message is the assistant's goes on inside that message.

Tools with ``defer_loading`` are not among the tools of a request, but shown in the result of the tool that found them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import msgspec

from .dialect import Answer, Body, Chat, Dialect, Event, Positive, arguments_text, parsed, pieces, sse, text_of
from .messages import ModelRequest

_BILLING = "x-anthropic-billing-header"
"""Begins a line of Claude Code's system prompt that changes in each turn."""
_THOUGHTS = frozenset(("thinking", "redacted_thinking"))
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERRORS = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 503: "overloaded_error"}


class _Message(msgspec.Struct):
    role: str
    content: str | list[dict[str, Any]]


class _Tool(msgspec.Struct):
    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    defer_loading: bool | None = None


class _Request(msgspec.Struct):
    messages: Annotated[list[_Message], msgspec.Meta(min_length=1)]
    system: str | list[Any] | None = None
    tools: list[_Tool] | None = None
    max_tokens: Positive | None = None
    stop_sequences: list[str] | None = None
    thinking: dict[str, Any] | None = None


def read(body: Body) -> ModelRequest:
    """Convert the body of a request; see `Dialect.read`.

    Raises:
        CallRefusedError: A field is wrong or not supported.
    """
    request, chat = parsed(body, _Request), Chat()
    lines = text_of(request.system).split("\n")
    if system := "\n".join(line for line in lines if not line.startswith(_BILLING)):
        chat.add("system", system)
    tools = request.tools or []
    deferred = {tool.name: _function(tool) for tool in tools if tool.defer_loading}
    for message in request.messages:
        _add(chat, message, deferred)
    continues = chat.messages[-1].role == "assistant"
    if continues:
        chat.end_inside(request.messages[-1].content)  # thinking blocks are refused
    functions = [(tool.type, _function(tool)) for tool in tools if not tool.defer_loading]
    stop = tuple(request.stop_sequences or ())
    return chat.request(body, _Request, functions, request.max_tokens, stop=stop, continues=continues)


def _add(chat: Chat, message: _Message, deferred: Mapping[str, Body | None]) -> None:
    given = message.content or ""
    blocks: list[Any] = [{"type": "text", "text": given}] if isinstance(given, str) else given
    if message.role == "assistant":
        chat.add("assistant", [one for one in blocks if one.get("type") not in {"tool_use", *_THOUGHTS}])
        for block in blocks:
            if block.get("type") == "tool_use":
                chat.add_call(block.get("id"), block.get("name"), block.get("input"))
        return
    texts: list[Any] = []
    for block in [*blocks, None]:
        is_result = block is not None and block.get("type") == "tool_result"
        if texts and (block is None or is_result):
            chat.add(message.role, texts)
            texts = []
        if is_result:
            content = block.get("content")
            parts = [_expanded(part, deferred) for part in content] if isinstance(content, list) else content
            chat.add_result(block.get("tool_use_id"), parts)
        else:
            texts.append(block)


def _expanded(part: Any, deferred: Mapping[str, Body | None]) -> Any:
    """Return a part of a tool's result. One that refers to a deferred tool becomes its definition."""
    if not isinstance(part, dict) or part.get("type") != "tool_reference":
        return part
    name = str(part.get("tool_name"))
    return {"type": "text", "text": msgspec.json.encode(deferred.get(name) or {"name": name}).decode()}


def _function(tool: _Tool) -> Body | None:
    """Return the function of a tool as in chat completions; None if Anthropic's servers would run it."""
    if tool.input_schema is None:
        return None
    return {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}


def _blocks(answer: Answer) -> list[dict[str, Any]]:
    reply = answer.replies[0]
    blocks: list[dict[str, Any]] = []
    # Clients that did not ask for thoughts read the text from the first block.
    if reply.thought and (answer.body.get("thinking") or {}).get("type", "disabled") != "disabled":
        blocks.append({"type": "thinking", "thinking": reply.thought, "signature": ""})
    if reply.content or not reply.calls:
        blocks.append({"type": "text", "text": reply.content})
    for position, call in enumerate(reply.calls):
        arguments = call.arguments if isinstance(call.arguments, dict) else {"arguments": call.arguments}
        named = {"type": "tool_use", "id": f"toolu_{answer.id}_{position}", "name": call.name}
        blocks.append({**named, "input": arguments})
    return blocks


def write(answer: Answer) -> dict[str, Any]:
    prompt, sampled = answer.num_tokens
    return {
        "id": f"msg_{answer.id}",
        "type": "message",
        "role": "assistant",
        "model": answer.model,
        "content": _blocks(answer),
        "stop_reason": "stop_sequence" if answer.replies[0].stop_text else _STOP_REASONS[answer.replies[0].finish],
        "stop_sequence": answer.replies[0].stop_text or None,
        "usage": {"input_tokens": prompt, "output_tokens": sampled},
    }


def stream(answer: Answer) -> Iterator[Event]:
    def event(kind: str, characters: int = 0, **fields: object) -> Event:
        return Event(sse({"type": kind, **fields}, kind), characters=characters)

    message = write(answer)
    yield event("message_start", message={**message, "content": [], "stop_reason": None})
    for index, block in enumerate(message["content"]):
        match block["type"]:
            case "text":
                yield event("content_block_start", index=index, content_block={**block, "text": ""})
                deltas = [("text_delta", "text", piece) for piece in pieces(block["text"])]
            case "thinking":
                yield event("content_block_start", index=index, content_block={**block, "thinking": ""})
                deltas = [("thinking_delta", "thinking", block["thinking"])]
            case _:
                yield event("content_block_start", index=index, content_block={**block, "input": {}})
                deltas = [("input_json_delta", "partial_json", arguments_text(block["input"]))]
        for kind, field, text in deltas:
            characters = len(text) if field == "text" else 0
            yield event("content_block_delta", characters, index=index, delta={"type": kind, field: text})
        yield event("content_block_stop", index=index)
    delta = {"stop_reason": message["stop_reason"], "stop_sequence": None}
    yield event("message_delta", delta=delta, usage=message["usage"])
    yield event("message_stop")


def error(status: int, code: str, message: str) -> Body:
    return {"type": "error", "error": {"type": _ERRORS.get(status, "invalid_request_error"), "message": message}}


DIALECT = Dialect(read, write, stream, error, sse({"type": "ping"}, "ping"), "prompt is too long")
