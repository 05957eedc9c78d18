"""OpenAI's Responses API. Its state, the earlier responses of an episode, is in a `ResponseStore`."""

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
    previous_response_id: str | None = None
    tools: list[dict[str, Any]] | None = None
    max_output_tokens: Positive | None = None
    store: bool | None = None


MAX_STORED = 256
"""Number of responses, and of their items, that a `ResponseStore` keeps."""


class ResponseStore:
    """The latest responses of one episode: what ``previous_response_id`` and ``item_reference`` refer to."""

    def __init__(self) -> None:
        self._responses: dict[str, Any] = {}  # lists of items
        self._items: dict[str, Any] = {}
        self.dialect = Dialect(self.read, self.write, self.stream, error)

    def read(self, body: Body) -> ModelRequest:
        """Convert the body of a request; see `Dialect.read`.

        Raises:
            CallRefusedError: A field is wrong or not supported, or refers to an unknown response or item.
        """
        if unknown := [name for name in ("conversation", "prompt", "background") if body.get(name)]:
            raise refused(f"{unknown[0]} is not supported; send the messages as input")
        request, chat = parsed(body, _Request), Chat()
        if request.instructions:
            chat.add("system", request.instructions)
        for item in self._history(request):
            _add(chat, item)
        if not chat.messages:
            raise refused("input is empty")
        functions = [(tool.get("type"), _function(tool)) for tool in _tools(request.tools or ())]
        return chat.request(body, _Request, functions, request.max_output_tokens)

    def _history(self, request: _Request) -> list[Body]:
        """Return all items of a request, with those that it refers to."""
        given, before = request.input, request.previous_response_id
        items = [*self._found(self._responses, "previous_response_id", before)] if before is not None else []
        for item in [{"role": "user", "content": given}] if isinstance(given, str) else given:
            is_reference = item.get("type") == "item_reference"
            items.append(self._found(self._items, "item_reference", item.get("id")) if is_reference else item)
        return items

    def _found(self, stored: dict[str, Any], field: str, id: Any) -> Any:
        if str(id) not in stored:
            raise refused(f"{field}: {id!r} is unknown, or belongs to a response with store: false")
        return stored[str(id)]

    def write(self, answer: Answer) -> dict[str, Any]:
        """Return the body of a response, and store it unless the client asks not to."""
        request, output, (prompt, sampled) = parsed(answer.body, _Request), _output(answer), answer.num_tokens
        if request.store is not False:
            self._responses[f"resp_{answer.id}"] = [*self._history(request), *output]
            self._items.update((item["id"], item) for item in output)
            for stored in (self._responses, self._items):
                while len(stored) > MAX_STORED:
                    del stored[next(iter(stored))]
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
            "previous_response_id": request.previous_response_id,
            "output": output,
            "tools": request.tools or [],
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "metadata": {},
            "usage": {**usage, **details},
        }

    def stream(self, answer: Answer) -> Iterator[Event]:
        number = -1

        def event(kind: str, characters: int = 0, **fields: Any) -> Event:
            nonlocal number
            number += 1
            data = {"type": f"response.{kind}", "sequence_number": number, **fields}
            return Event(sse(data, f"response.{kind}"), characters=characters)

        response = self.write(answer)
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
