"""Anthropic's messages, read and written."""

from __future__ import annotations

import json
from typing import Any

from envkit.trainer_bridge.agents.anthropic_messages import read, stream, write
from envkit.trainer_bridge.agents.dialect import PIECE_CHARACTERS, Answer
from envkit.trainer_bridge.agents.messages import AgentToolCall, ChatMessage, Reply

USER = {"role": "user", "content": "hi"}
USE = {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": 1}}
CACHE = {"cache_control": {"type": "ephemeral"}}


def text(content: str, **more: object) -> dict[str, object]:
    return {"type": "text", "text": content, **more}


def answer(reply: Reply, **body: object) -> Answer:
    return Answer("1", 7, {"model": "claude", **body}, [reply])


def events(given: Answer) -> list[Any]:
    return [json.loads(event.data.decode().partition("data: ")[2]) for event in stream(given)]


def test_the_fields_that_have_an_effect_are_read() -> None:
    tool = {"name": "look", "description": "looks", "input_schema": {"type": "object"}, **CACHE}
    body = {"model": "claude", "max_tokens": 9, "stop_sequences": ["x"], "tools": [tool], "system": "be kind"}
    request = read({"messages": [USER], **body, "temperature": 1, "top_k": 3, "metadata": {}})
    function = {"name": "look", "description": "looks", "parameters": {"type": "object"}}
    assert request.messages == (ChatMessage("system", "be kind"), ChatMessage("user", "hi"))
    assert request.tools == ({"type": "function", "function": function},)
    assert (request.model, request.max_tokens, request.stop, request.n) == ("claude", 9, ("x",), 1)
    assert request.unused == ("metadata", "temperature", "top_k")


def test_tools_that_only_anthropic_can_run_are_named() -> None:
    request = read({"messages": [USER], "tools": [{"type": "web_search_20250305", "name": "web_search"}]})
    assert (request.tools, request.unused) == ((), ("tools.web_search_20250305",))


def test_an_answer_is_written() -> None:
    reply = Reply(
        content="I look",
        thought="hm",
        calls=(AgentToolCall("look", {"at": 1}),),
        finish="tool_calls",
        prompt_tokens=4,
        completion_tokens=1,
    )
    assert write(answer(reply)) == {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "claude",
        "content": [text("I look"), {**USE, "id": "toolu_1_0"}],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {"input_tokens": 4, "output_tokens": 1},
    }


def test_a_stream_has_the_events_of_the_api() -> None:
    call = AgentToolCall("look", {"at": 1})
    reply = Reply(content="x" * (PIECE_CHARACTERS + 1), thought="hm", calls=(call,), finish="tool_calls")
    sent = events(answer(reply, thinking={"type": "enabled"}))
    assert sent[0]["message"]["content"] == []
    assert sent[0]["message"]["stop_reason"] is None
    assert sent[1:-2] == [
        {
            "type": "content_block_start",
            "index": 0,
            "content_block": {"type": "thinking", "thinking": "", "signature": ""},
        },
        {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "hm"}},
        {"type": "content_block_stop", "index": 0},
        {"type": "content_block_start", "index": 1, "content_block": text("")},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "x" * PIECE_CHARACTERS}},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "x"}},
        {"type": "content_block_stop", "index": 1},
        {"type": "content_block_start", "index": 2, "content_block": {**USE, "id": "toolu_1_0", "input": {}}},
        {"type": "content_block_delta", "index": 2, "delta": {"type": "input_json_delta", "partial_json": '{"at":1}'}},
        {"type": "content_block_stop", "index": 2},
    ]
    assert sent[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert sent[-1] == {"type": "message_stop"}
