"""Streams: the same answer in pieces, kept alive while it is sampled, and cut by the client or by an error."""

from __future__ import annotations

import json
import re
from itertools import islice
from typing import Any

import pytest

from envkit.trainer_bridge.agents.messages import ModelRequest, Reply
from tests.conformance.agents.client import CHAT, MESSAGES, RESPONSES, ROUTES, Exchange, assistant, user
from tests.conformance.agents.served import FAILS_AFTER, STALLS_AFTER, AnyProxy, OwnProxy
from tests.trainer_bridge.agents.agents import TOOL

HI = user("hi")
LONG = "word " * 120
LONG_ANSWER = 120
"""Limit of tokens of an answer that a model samples for some seconds."""
CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls \\u00e4"}}\n</tool_call>'

each_route = pytest.mark.parametrize("route", ROUTES)


def final(asked: Exchange, route: str) -> tuple[str, Any]:
    """Return the text of a stream, and the arguments of its tool call."""
    text, calls = "".join(asked.pieces()), ""
    for event in asked.events():
        match event:
            case {"choices": [{"delta": {"tool_calls": [call]}}]}:
                calls += call["function"]["arguments"]
            case {"type": "content_block_delta", "delta": {"partial_json": piece}}:
                calls += piece
            case {"type": "response.function_call_arguments.delta", "delta": piece}:
                calls += piece
    return text, json.loads(calls or "null")


@each_route
def test_a_stream_has_the_text_and_the_tool_calls_of_the_answer(proxy: AnyProxy, route: str) -> None:
    tool: Any = {
        CHAT: TOOL,
        RESPONSES: {"type": "function", **TOOL["function"]},
        MESSAGES: {"name": "bash", "description": "Run a command.", "input_schema": TOOL["function"]["parameters"]},
    }[route]
    with proxy.episode(f"I look.\n{CALL}") as agent:
        asked = agent.ask(user("Call bash."), route=route, stream=True, tools=[tool])
        text, arguments = final(asked, route)
        agent.scripted((text, arguments), ("I look.", {"command": "ls ä"}))
        assert asked.response.headers["content-type"].startswith("text/event-stream")
        if arguments is None:
            pytest.skip("the model called no tool")
        assert isinstance(arguments, dict)
    agent.trains(f"S:TOOLS| U:Call bash.| A:[I look.\n{CALL}|]")


@each_route
def test_a_stream_ends_with_the_last_event_of_the_api(proxy: AnyProxy, route: str) -> None:
    with proxy.episode("yes") as agent:
        asked = agent.ask(
            HI, route=route, stream=True, **({"stream_options": {"include_usage": True}} if route == CHAT else {})
        )
        *_, last = asked.events()
        if route == CHAT:
            assert asked.content.rstrip().endswith(b"data: [DONE]")
            assert (last["choices"], last["usage"]["completion_tokens"] > 0) == ([], True)
        else:
            ends = {RESPONSES: ["response.completed", "response.incomplete"], MESSAGES: ["message_stop"]}[route]
            assert last["type"] in ends
            agent.scripted(last["type"], ends[0])
    agent.trains("U:hi| A:[yes|]")


@each_route
def test_a_stream_is_kept_alive_while_the_policy_samples(proxy: AnyProxy, route: str) -> None:
    with proxy.episode("~yes") as agent:
        limit = "max_output_tokens" if route == RESPONSES else "max_tokens"
        asked = agent.begun(HI, route=route, stream=True, **{limit: LONG_ANSWER})
        ping = re.compile(rb'data: ?\{"type": ?"ping"\}' if route == MESSAGES else rb":")
        is_alive = any(map(ping.match, asked.lines()))
        agent.scripted(is_alive, True)
        if not is_alive:
            pytest.skip("the answer came before a keep-alive")
        agent.release()
        text = "".join(asked.pieces())
        assert text
        agent.scripted(text, "yes")
    agent.trains("U:hi| A:[yes|]")


@each_route
def test_the_end_of_the_episode_within_a_stream_is_an_error_event(own: OwnProxy, route: str) -> None:
    with own.episode("~yes") as agent:
        asked = agent.begun(HI, route=route, stream=True)
        next(asked.lines())
    *_, last = asked.events()
    assert asked.status == 200
    assert last["error"]["message"] in ("the sampling was stopped", "the episode is over")
    agent.trains(aborted=4)


@each_route
@pytest.mark.parametrize("header", [STALLS_AFTER, FAILS_AFTER])
def test_only_the_part_of_a_cut_stream_that_the_client_received_is_trained_on_and_continued(
    proxy: AnyProxy, route: str, header: str
) -> None:
    with proxy.episode(LONG, "two") as agent:
        cut = agent.begin(HI, route=route, stream=True, headers={header: "word"})
        begun = next(cut.pieces(), "")
        cut.close()
        agent.settle()
        agent.ask(HI, assistant(begun), user("go on"), route=route)
    rest = len(LONG) - len(begun) + 1
    agent.trains(f"U:hi| A:[{begun}]| U:go on| A:[two|]", unread=rest)


def test_an_answer_is_received_whole_only_with_the_last_byte_of_its_stream(own: OwnProxy) -> None:
    with own.episode("yes") as agent:
        cut = agent.begin(HI, stream=True, headers={STALLS_AFTER: '"finish_reason":"stop"'})
        assert [one["choices"][0]["finish_reason"] for one in islice(cut.events(), 3)] == [None, None, "stop"]
        cut.close()
        agent.settle()
    agent.trains("U:hi| A:[yes]", unread=1)


def test_of_several_answers_in_a_stream_each_is_received_by_itself(own: OwnProxy) -> None:
    with own.episode(*["yes"] * 3) as agent:
        cut = agent.begin(HI, n=3, stream=True, headers={STALLS_AFTER: '{"index":1,"delta":{"content":"yes"}'})
        assert [*islice(cut.pieces(), 2)] == ["yes", "yes"]
        cut.close()
        agent.settle()
    agent.trains(*["U:hi| A:[yes]"] * 2, unread=2 + 4)


def test_an_answer_that_the_client_never_received_is_not_trained_on(proxy: AnyProxy) -> None:
    with proxy.episode("~yes", "two") as agent:
        agent.begun(HI).close()
        agent.settle()
        agent.release()
        agent.settle()
        agent.ask(HI, assistant("yes"), user("go on"))
    agent.trains("U:hi| A:yes| U:go on| A:[two|]", unread=4)


def test_a_client_may_keep_only_the_beginning_of_an_answer(proxy: AnyProxy) -> None:
    with proxy.episode("one and the rest", "two") as agent:
        agent.ask(HI, stream=True)
        agent.ask(HI, assistant("one"), user("go on"))
    agent.trains("U:hi| A:[one]| U:go on| A:[two|]", rewritten=14)


class LongCall:
    """The only call of an episode. Its answer has more characters than the buffers of the sockets."""

    def __init__(self) -> None:
        self.received: list[int | None] = []

    def start(self, request: ModelRequest) -> LongCall:
        return self

    async def replies(self) -> list[Reply]:
        return [Reply(content="x" * (64 << 20))]

    def delivered(self, index: int, characters: int | None) -> None:
        self.received.append(characters)


def test_a_client_that_closes_a_long_stream_has_received_a_part(own: OwnProxy) -> None:
    call = LongCall()
    with own.serving(call) as client:
        cut = client.begin(HI, stream=True)
        next(cut.pieces())
        cut.close()
        own.until(lambda: bool(call.received))
    (characters,) = call.received
    assert 0 < (characters or 0) < 64 << 20
