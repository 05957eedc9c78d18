"""OpenAI's Responses API, read and written."""

from __future__ import annotations

import json
from typing import Any

import pytest

from envkit.trainer_bridge.agents.dialect import PIECE_CHARACTERS, Answer
from envkit.trainer_bridge.agents.messages import AgentToolCall, CallRefusedError, ChatMessage, Reply
from envkit.trainer_bridge.agents.responses import MAX_STORED, ResponseStore

CALL = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"at": 1}'}
LOOK = AgentToolCall("look", {"at": 1})


def written(reply: Reply, **body: object) -> dict[str, Any]:
    return ResponseStore().write(Answer("1", 7, body, [reply]))


def test_the_fields_that_have_an_effect_are_read() -> None:
    tool = {
        "type": "function",
        "name": "look",
        "description": "looks",
        "parameters": {"type": "object"},
        "strict": None,
    }
    body = {"model": "gpt", "input": "hi", "instructions": "be kind", "max_output_tokens": 9, "tools": [tool]}
    request = ResponseStore().read({**body, "include": ["reasoning.encrypted_content"], "store": False, "text": {}})
    function = {"name": "look", "description": "looks", "parameters": {"type": "object"}}
    assert request.messages == (ChatMessage("system", "be kind"), ChatMessage("user", "hi"))
    assert request.tools == ({"type": "function", "function": function},)
    assert (request.model, request.max_tokens, request.unused) == ("gpt", 9, ("include", "text"))


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"input": [{"type": "item_reference", "id": ["x"]}]}, "item_reference: .* is unknown"),
        ({"input": [{"type": "web_search_call"}]}, "input items of the type 'web_search_call' are not supported"),
        ({"input": []}, "input is empty"),
        ({"background": True}, "background is not supported"),
    ],
)
def test_what_is_wrong_or_not_supported_is_refused_by_name(body: dict[str, object], why: str) -> None:
    with pytest.raises(CallRefusedError, match=why) as error:
        ResponseStore().read({"input": "hi", **body})
    assert error.value.kind == "request"


def test_a_response_is_written() -> None:
    reply = Reply(content="I look", calls=(LOOK,), finish="tool_calls", prompt_tokens=4, completion_tokens=1)
    response = written(reply, model="gpt", input="hi", tools=[])
    assert (response["id"], response["status"], response["model"]) == ("resp_1", "completed", "gpt")
    assert response["output"] == [
        {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "I look", "annotations": [], "logprobs": []}],
            "status": "completed",
        },
        {**CALL, "id": "fc_1_0", "call_id": "call_1_0", "arguments": '{"at":1}', "status": "completed"},
    ]
    usage = response["usage"]
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (4, 1, 5)


def test_a_stream_has_the_events_of_the_api() -> None:
    reply = Reply(content="x" * (PIECE_CHARACTERS + 1), thought="hm", calls=(LOOK,))
    streamed = list(ResponseStore().stream(Answer("1", 7, {"input": "hi"}, [reply])))
    sent = [json.loads(event.data.decode().partition("data: ")[2]) for event in streamed]
    assert [one["type"].removeprefix("response.") for one in sent] == [
        *("created", "in_progress"),
        *("output_item.added", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    assert [one["sequence_number"] for one in sent] == list(range(16))
    assert sum(event.characters for event in streamed) == PIECE_CHARACTERS + 1


def test_only_the_latest_responses_can_be_continued() -> None:
    store = ResponseStore()
    for number in range(MAX_STORED + 1):
        store.write(Answer(str(number), 7, {"input": "hi"}, [Reply(content="yes")]))
    for field, prefix in (("previous_response_id", "resp"), ("item_reference", "msg")):
        for number, is_known in ((0, False), (1, True)):
            id = f"{prefix}_{number}"
            item = {"type": "item_reference", "id": id}
            body = {"input": "and?", "previous_response_id": id} if prefix == "resp" else {"input": [item]}
            if is_known:
                assert store.read(body).messages[-1].content in ("and?", "yes")
            else:
                with pytest.raises(CallRefusedError, match=field):
                    store.read(body)
