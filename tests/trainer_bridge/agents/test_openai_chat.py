"""Chat completions of OpenAI, read and written."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from envkit.trainer_bridge.agents.dialect import PIECE_CHARACTERS, Answer
from envkit.trainer_bridge.agents.messages import AgentToolCall, CallRefusedError, ChatMessage, Reply
from envkit.trainer_bridge.agents.openai_chat import MAX_ANSWERS, read, stream, write

USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def messages(*given: object) -> tuple[ChatMessage, ...]:
    return read({"messages": given}).messages


def calling(*arguments: object, ids: Sequence[str] = ("a", "b", "c")) -> dict[str, object]:
    calls = [
        {"id": id, "type": "function", "function": {"name": "look", "arguments": one}}
        for id, one in zip(ids, arguments, strict=False)
    ]
    return {"role": "assistant", "tool_calls": calls}


def answer(*replies: Reply, **body: object) -> Answer:
    return Answer("1", 7, {"model": "gpt", **body}, replies)


def chunks(given: Answer) -> list[Any]:
    texts = [event.data.decode().removeprefix("data: ").strip() for event in stream(given)]
    assert texts.pop() == "[DONE]"
    return [json.loads(text) for text in texts]


def test_the_fields_that_have_an_effect_are_read() -> None:
    request = read({"model": "gpt", "messages": [USER], "tools": [TOOL], "max_tokens": 9, "stop": ["a", "b"], "n": 2})
    assert request.messages == (ChatMessage("user", "hi"),)
    assert (request.model, request.tools, request.n, request.stop) == ("gpt", (TOOL,), 2, ("a", "b"))
    assert (request.max_tokens, request.continues, request.unused) == (9, False, ())


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"messages": [USER], "functions": []}, "functions is not supported; use tools"),
        ({"messages": []}, "invalid request: Expected `array` of length >= 1 - at `$.messages`"),
        ({"messages": [USER], "n": MAX_ANSWERS + 1}, "invalid request: Expected `int` <= 128 - at `$.n`"),
        ({"messages": [USER], "tools": [{"type": "function"}]}, "tools: a function has no name"),
        ({"messages": [{"role": "function"}]}, "messages of the role 'function' are not supported"),
        ({"messages": [{**calling("{}"), "prefix": True}]}, "the answer can only go on inside a last message"),
    ],
)
def test_what_is_wrong_or_not_supported_is_refused_by_name(body: dict[str, object], why: str) -> None:
    with pytest.raises(CallRefusedError) as error:
        read(body)
    assert error.value.kind == "request"
    assert str(error.value).startswith(why)


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        ("{broken", "{broken"),
        ("", {}),
        (None, {}),
        ("[" * 5000, "[" * 5000),
    ],
)
def test_arguments_that_are_not_json_are_text(arguments: object, value: object) -> None:
    assert messages(calling(arguments))[0].calls[0].arguments == value


def test_an_answer_is_written() -> None:
    call = AgentToolCall("look", {"at": "ä"})
    reply = Reply(content="", thought="hm", calls=(call,), finish="tool_calls", prompt_tokens=4, completion_tokens=1)
    function = {"name": "look", "arguments": '{"at":"ä"}'}
    assert write(answer(reply)) == {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 7,
        "model": "gpt",
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": None,
                    "reasoning_content": "hm",
                    "tool_calls": [{"id": "call_1_0_0", "type": "function", "function": function}],
                },
                "finish_reason": "tool_calls",
            }
        ],
        "usage": {"prompt_tokens": 4, "completion_tokens": 1, "total_tokens": 5},
    }


def test_a_stream_has_the_parts_of_the_answer_in_order() -> None:
    call = AgentToolCall("look", {"at": 1})
    first = Reply(content="x" * (PIECE_CHARACTERS + 1), thought="hm", calls=(call,), finish="tool_calls")
    deltas = [
        (one["choices"][0]["index"], one["choices"][0]["delta"]) for one in chunks(answer(first, Reply(content="y")))
    ]
    function = {"name": "look", "arguments": '{"at":1}'}
    assert deltas == [
        (0, {"role": "assistant", "content": ""}),
        (0, {"reasoning_content": "hm"}),
        (0, {"content": "x" * PIECE_CHARACTERS}),
        (0, {"content": "x"}),
        (0, {"tool_calls": [{"index": 0, "id": "call_1_0_0", "type": "function", "function": function}]}),
        (0, {}),
        (1, {"role": "assistant", "content": ""}),
        (1, {"content": "y"}),
        (1, {}),
    ]


def test_a_stream_ends_with_the_usage_if_the_client_asks() -> None:
    given = answer(Reply(content="a", prompt_tokens=2, completion_tokens=1), stream_options={"include_usage": True})
    usage = {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3}
    assert chunks(given)[-1]["usage"] == usage
    assert "usage" not in chunks(answer(Reply(content="a")))[-1]
