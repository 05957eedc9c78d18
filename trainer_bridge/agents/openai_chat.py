"""OpenAI's chat completions, with the extensions of vLLM and DeepSeek for an answer that goes on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import msgspec

from .dialect import Answer, Body, Chat, Dialect, Event, Positive, arguments_text, parsed, pieces, refused, sse
from .messages import ModelRequest

MAX_ANSWERS = 128


class _Function(msgspec.Struct):
    name: str
    arguments: Any = None


class _ToolCall(msgspec.Struct):
    function: _Function
    id: str | None = None


class _Message(msgspec.Struct):
    role: str
    content: Any = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None
    prefix: bool | None = None


class _Tool(msgspec.Struct):
    type: str
    function: dict[str, Any] = {}


class _Request(msgspec.Struct):
    messages: Annotated[list[_Message], msgspec.Meta(min_length=1)]
    tools: list[_Tool] | None = None
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    stop: str | list[str] | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_ANSWERS)] | None = None
    logprobs: bool | None = None
    stream_options: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None


def read(body: Body) -> ModelRequest:
    """Convert the body of a request; see `Dialect.read`.

    Raises:
        CallRefusedError: A field is wrong, or is not supported, such as ``functions``.
    """
    if legacy := [name for name in ("functions", "function_call") if body.get(name) is not None]:
        raise refused(f"{legacy[0]} is not supported; use tools")
    request, chat = parsed(body, _Request), Chat()
    for message in request.messages:
        if message.role == "tool":
            chat.add_result(message.tool_call_id, message.content)
            continue
        chat.add(message.role, message.content)
        for call in message.tool_calls or ():
            chat.add_call(call.id, call.function.name, call.function.arguments)
    continues = bool(request.continue_final_message or request.messages[-1].prefix)
    if continues:
        chat.end_inside(request.messages[-1].content)
    functions = [(tool.type, tool.function if tool.type == "function" else None) for tool in request.tools or ()]
    limits = [limit for limit in (request.max_tokens, request.max_completion_tokens) if limit is not None]
    stop = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
    return chat.request(
        body,
        _Request,
        functions,
        min(limits, default=None),
        stop=stop,
        n=request.n or 1,
        logprobs=bool(request.logprobs),
        continues=continues,
    )


def write(answer: Answer) -> Body:
    choices = []
    for index, reply in enumerate(answer.replies):
        message: dict[str, object] = {"role": "assistant", "content": reply.content or None}
        if reply.thought:
            message["reasoning_content"] = reply.thought
        if reply.calls:
            message["tool_calls"] = _tool_calls(answer, index)
        choice = {"index": index, "message": message, "finish_reason": reply.finish}
        choices.append({**choice, **_logprobs(answer, index)})
    return {**_head(answer, "chat.completion"), "choices": choices, "usage": _usage(answer)}


def stream(answer: Answer) -> Iterator[Event]:
    head = _head(answer, "chat.completion.chunk")
    for index, reply in enumerate(answer.replies):

        def event(characters: int, delta: Body, index: int = index, **more: object) -> Event:
            choice = {"index": index, "delta": delta, "finish_reason": None, **more}
            return Event(sse({**head, "choices": [choice]}), index, characters)

        yield event(0, {"role": "assistant", "content": ""}, **_logprobs(answer, index))
        if reply.thought:
            yield event(0, {"reasoning_content": reply.thought})
        for piece in pieces(reply.content):
            yield event(len(piece), {"content": piece})
        for position, call in enumerate(_tool_calls(answer, index)):
            yield event(0, {"tool_calls": [{"index": position, **call}]})
        yield event(0, {}, finish_reason=reply.finish)
    if (answer.body.get("stream_options") or {}).get("include_usage"):
        yield Event(sse({**head, "choices": [], "usage": _usage(answer)}))
    yield Event(b"data: [DONE]\n\n")


def error(status: int, code: str, message: str) -> Body:
    kind = code if code == "context_length_exceeded" else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def _head(answer: Answer, kind: str) -> dict[str, object]:
    return {"id": f"chatcmpl-{answer.id}", "object": kind, "created": answer.created_s, "model": answer.model}


def _tool_calls(answer: Answer, index: int) -> list[Body]:
    calls: list[Body] = []
    for position, call in enumerate(answer.replies[index].calls):
        function = {"name": call.name, "arguments": arguments_text(call.arguments)}
        calls.append({"id": f"call_{answer.id}_{index}_{position}", "type": "function", "function": function})
    return calls


def _logprobs(answer: Answer, index: int) -> dict[str, Any]:
    if not answer.body.get("logprobs"):
        return {}
    tokens = answer.replies[index].tokens
    fields = [
        {"token": text, "logprob": logp, "bytes": list(text.encode()), "top_logprobs": []} for text, logp in tokens
    ]
    return {"logprobs": {"content": fields}}


def _usage(answer: Answer) -> Body:
    prompt, sampled = answer.num_tokens
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


DIALECT = Dialect(read, write, stream, error)
