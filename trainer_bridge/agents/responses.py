"""OpenAI's Responses API without its state: a request has all messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from .dialect import Answer, Body, Chat, Dialect, Event, Positive, arguments_text, parsed, pieces, refused, sse
from .messages import ModelRequest
from .openai_chat import error


class _Request(msgspec.Struct):
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    max_output_tokens: Positive | None = None
    store: bool | None = None  # nothing is stored


_REFUSED = ("conversation", "prompt", "background", "previous_response_id")


def read(body: Body) -> ModelRequest:
    """Convert the body of a request; see `Dialect.read`.

    Raises:
        CallRefusedError: A field is wrong or not supported, such as ``previous_response_id``.
    """
    if unknown := [name for name in _REFUSED if body.get(name)]:
        raise refused(f"{unknown[0]} is not supported; send the messages as input")
    request, chat = parsed(body, _Request), Chat()
    if request.instructions:
        chat.add("system", request.instructions)
    given = request.input
    for item in [{"role": "user", "content": given}] if isinstance(given, str) else given:
        _add(chat, item)
    if not chat.messages:
        raise refused("input is empty")
    functions = [(tool.get("type"), _function(tool)) for tool in _tools(request.tools or ())]
    return chat.request(body, _Request, functions, request.max_output_tokens)


def write(answer: Answer) -> dict[str, Any]:
    request, output, (prompt, sampled) = parsed(answer.body, _Request), _output(answer), answer.num_tokens
    is_cut = answer.replies[0].finish == "length"
    usage = {"input_tokens": prompt, "output_tokens": sampled, "total_tokens": prompt + sampled}
    details = {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
    return {
        "id": f"resp_{answer.id}",
        "object": "response",
        "created_at": answer.created_s,
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "error": None,
        "model": answer.model,
        "instructions": request.instructions,
        "previous_response_id": None,
        "output": output,
        "tools": request.tools or [],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "metadata": {},
        "usage": {**usage, **details},
    }


def stream(answer: Answer) -> Iterator[Event]:
    number = -1

    def event(kind: str, characters: int = 0, **fields: Any) -> Event:
        nonlocal number
        number += 1
        data = {"type": f"response.{kind}", "sequence_number": number, **fields}
        return Event(sse(data, f"response.{kind}"), characters=characters)

    response = write(answer)
    begun = {**response, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    yield event("created", response=begun)
    yield event("in_progress", response=begun)
    for index, item in enumerate(response["output"]):
        place = {"item_id": item["id"], "output_index": index}
        text = {"content_index": 0, "logprobs": [], **place}
        empty: Body = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
        yield event("output_item.added", output_index=index, item={**item, **empty, "status": "in_progress"})
        if item["type"] == "message":
            (part,) = item["content"]
            yield event("content_part.added", **place, content_index=0, part={**part, "text": ""})
            for piece in pieces(part["text"]):
                yield event("output_text.delta", len(piece), **text, delta=piece)
            yield event("output_text.done", **text, text=part["text"])
            yield event("content_part.done", **place, content_index=0, part=part)
        elif item["type"] == "function_call":
            arguments = item["arguments"]
            yield event("function_call_arguments.delta", **place, delta=arguments)
            yield event("function_call_arguments.done", **place, name=item["name"], arguments=arguments)
        yield event("output_item.done", output_index=index, item=item)
    yield event(response["status"], response=response)


def _add(chat: Chat, item: Body) -> None:
    """Add an item to a chat. An answer's text and its calls, which are separate items, become one message."""
    match item.get("type", "message"):
        case "message":
            chat.add(str(item.get("role")), item.get("content"))
        case "function_call":
            space = f"{item['namespace']}." if item.get("namespace") else ""
            chat.add_call(item.get("call_id"), f"{space}{item.get('name')}", item.get("arguments"))
        case "function_call_output":
            chat.add_result(item.get("call_id"), item.get("output"))
        case "reasoning":  # encrypted or not, thoughts are no part of later prompts
            pass
        case kind:
            raise refused(f"input items of the type {kind!r} are not supported")


def _tools(given: Sequence[Body]) -> Iterator[Body]:
    """Yield tools; the name of one in a namespace begins with that of the namespace.

    Raises:
        CallRefusedError: A namespace is no list of tools.
    """
    for tool in given:
        if tool.get("type") != "namespace":
            yield tool
            continue
        for one in parsed(tool.get("tools") or [], list[dict[str, Any]]):
            yield {**one, "name": f"{tool.get('name')}.{one.get('name')}", "namespace": tool.get("name")}


def _function(tool: Body) -> Body | None:
    """Return the function of a tool as in chat completions; None if OpenAI's servers would run it."""
    if tool.get("type") != "function":
        return None
    return {name: tool[name] for name in ("name", "description", "parameters", "strict") if tool.get(name) is not None}


def _output(answer: Answer) -> list[dict[str, Any]]:
    reply, id = answer.replies[0], answer.id
    output: list[dict[str, Any]] = []
    if reply.thought:
        content = [{"type": "reasoning_text", "text": reply.thought}]
        output.append({"id": f"rs_{id}", "type": "reasoning", "summary": [], "content": content})
    if reply.content or not reply.calls:
        text = {"type": "output_text", "text": reply.content, "annotations": [], "logprobs": []}
        output.append({"id": f"msg_{id}", "type": "message", "role": "assistant", "content": [text]})
    spaces = {
        tool.get("name"): tool["namespace"] for tool in _tools(answer.body.get("tools") or ()) if "namespace" in tool
    }
    for position, call in enumerate(reply.calls):
        ids = {"id": f"fc_{id}_{position}", "type": "function_call", "call_id": f"call_{id}_{position}"}
        space = spaces.get(call.name)
        names = {"name": call.name} if space is None else {"name": call.name[len(f"{space}.") :], "namespace": space}
        output.append({**ids, **names, "arguments": arguments_text(call.arguments)})
    return [{**item, "status": "incomplete" if reply.finish == "length" else "completed"} for item in output]


DIALECT = Dialect(read, write, stream, error)
