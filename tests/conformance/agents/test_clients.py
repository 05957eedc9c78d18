"""The clients that agent programs use, OpenAI's and Anthropic's, need no setting but the address.

They are imported late: that takes a second, in each worker that collects the tests.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from envkit.trainer_bridge.rollout import RolloutLimits
from tests.conformance.agents.client import CHAT, MAX_TOKENS, MESSAGES, TIMEOUT_S
from tests.conformance.agents.served import AnyProxy, OwnProxy
from tests.trainer_bridge.agents.agents import TOOL

if TYPE_CHECKING:
    import anthropic
    import openai

    OpenAI = Callable[..., openai.OpenAI]
    Anthropic = Callable[..., anthropic.Anthropic]

HI: Any = {"role": "user", "content": "hi"}
CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls ä"}}\n</tool_call>'
LOOK = f"<think>hm</think>\n\nI look.\n{CALL}"
FUNCTION: Any = TOOL["function"]
MESSAGES_TOOL: Any = {"name": "bash", "description": FUNCTION["description"], "input_schema": FUNCTION["parameters"]}
ROWS = f"S:TOOLS| U:hi| A:[{LOOK}|] U:<tool_response>\nx\n</tool_response>| A:[done|]"


streamed_or_not = pytest.mark.parametrize("stream", [False, True])


@pytest.fixture(scope="module")
def of_openai() -> Iterator[OpenAI]:
    """Returns OpenAI's client for an agent."""
    import openai

    with openai.OpenAI(base_url="http://127.0.0.1", api_key="unused", timeout=TIMEOUT_S) as client:
        yield lambda agent, **options: client.with_options(base_url=agent.url, api_key=agent.api_key, **options)


@pytest.fixture(scope="module")
def of_anthropic() -> Iterator[Anthropic]:
    """Returns Anthropic's client for an agent."""
    import anthropic

    with anthropic.Anthropic(base_url="http://127.0.0.1", api_key="unused", timeout=TIMEOUT_S) as client:
        yield lambda agent, **options: client.with_options(
            base_url=agent.url.removesuffix("/v1"), api_key=agent.api_key, **options
        )


@streamed_or_not
def test_openai_reads_an_answer_and_sends_it_back(own: OwnProxy, of_openai: OpenAI, stream: bool) -> None:
    with own.episode(LOOK, "done") as agent:
        client = of_openai(agent)
        asked: Any = {"model": "gpt", "messages": [HI], "tools": [TOOL]}
        if stream:
            with client.chat.completions.stream(**asked, stream_options={"include_usage": True}) as streamed:
                completion: Any = streamed.get_final_completion()
        else:
            completion = client.chat.completions.create(**asked)
        message = completion.choices[0].message
        (call,) = message.tool_calls
        assert (message.content, json.loads(call.function.arguments)) == ("I look.", {"command": "ls ä"})
        assert completion.usage.completion_tokens > 0
        result = {"role": "tool", "tool_call_id": call.id, "content": "x"}
        sent = message.model_dump(exclude={"parsed"})
        client.chat.completions.create(**{**asked, "messages": [HI, sent, result]})
    agent.trains(ROWS)


@streamed_or_not
def test_openai_reads_several_answers(proxy: AnyProxy, of_openai: OpenAI, stream: bool) -> None:
    with proxy.episode("a", "b", "c") as agent:
        agent.needs(CHAT)
        client = of_openai(agent)
        answer: Any = client.chat.completions.create(
            model=agent.model, max_tokens=MAX_TOKENS, messages=[HI], n=3, stream=stream
        )
        texts = ["", "", ""]
        for part in answer if stream else [answer]:
            for choice in part.choices:
                texts[choice.index] += (choice.delta if stream else choice.message).content or ""
        agent.scripted(sorted(texts), ["a", "b", "c"])
        assert all(texts)
    agent.trains(*(f"U:hi| A:[{text}|]" for text in "abc"))


@streamed_or_not
def test_openai_goes_on_from_a_response(own: OwnProxy, of_openai: OpenAI, stream: bool) -> None:
    with own.episode(LOOK, "done") as agent:
        client = of_openai(agent)
        asked: Any = {"model": "gpt", "tools": [{"type": "function", **FUNCTION}]}
        if stream:
            with client.responses.stream(input="hi", **asked) as streamed:
                response: Any = streamed.get_final_response()
        else:
            response = client.responses.create(input="hi", **asked)
        assert (response.output_text, json.loads(response.output[-1].arguments)) == ("I look.", {"command": "ls ä"})
        output: Any = {"type": "function_call_output", "call_id": response.output[-1].call_id, "output": "x"}
        client.responses.create(input=[output], previous_response_id=response.id, **asked)
    agent.trains(ROWS)


@streamed_or_not
def test_anthropic_reads_an_answer_and_sends_it_back(own: OwnProxy, of_anthropic: Anthropic, stream: bool) -> None:
    with own.episode(LOOK, "done") as agent:
        client = of_anthropic(agent)
        thinking = {"type": "enabled", "budget_tokens": 1024}
        asked: Any = {"model": "claude", "max_tokens": 2000, "tools": [MESSAGES_TOOL], "thinking": thinking}
        if stream:
            with client.messages.stream(messages=[HI], **asked) as streamed:
                message: Any = streamed.get_final_message()
        else:
            message = client.messages.create(messages=[HI], **asked)
        assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
        assert (message.stop_reason, message.content[2].input) == ("tool_use", {"command": "ls ä"})
        result = {"type": "tool_result", "tool_use_id": message.content[2].id, "content": "x"}
        history: Any = [HI, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
        counted = client.messages.count_tokens(model="claude", messages=history, tools=[MESSAGES_TOOL])
        assert client.messages.create(messages=history, **asked).usage.input_tokens == counted.input_tokens
    agent.trains(ROWS)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("context", "maximum context length|prompt is too long"),
        ("budget", "limit of 1 calls"),
        ("ended", "the episode has ended"),
    ],
)
def test_refusals_are_raised_and_not_retried(
    own: OwnProxy, of_openai: OpenAI, of_anthropic: Anthropic, kind: str, words: str
) -> None:
    import anthropic
    import openai

    asked: Any = [{**HI, "content": "long " * 99 if kind == "context" else "hi"}]
    with own.episode("yes", limits=RolloutLimits(max_turns=1, max_tokens=60, turn_tokens=20)) as agent:
        if kind == "budget":
            agent.ask(HI)
        if kind == "ended":
            agent.end()
        before = own.num_requests
        with pytest.raises(openai.APIStatusError, match=words):
            of_openai(agent).chat.completions.create(model="gpt", messages=asked)
        with pytest.raises(anthropic.APIStatusError, match=words):
            of_anthropic(agent).messages.create(model="claude", max_tokens=9, messages=asked)
        assert own.num_requests == before + 2


@pytest.mark.parametrize("name", ["openai", "anthropic"])
def test_a_client_that_retries_after_a_timeout_gets_the_running_call(
    own: OwnProxy, of_openai: OpenAI, of_anthropic: Anthropic, name: str
) -> None:
    with own.episode("~yes") as agent:
        first = own.num_requests + 1
        released = agent.release_when(lambda: own.num_requests > first)
        text: Any
        if name == "openai":
            chat = of_openai(agent, timeout=0.2, max_retries=9).chat.completions
            text = chat.create(model="gpt", messages=[HI]).choices[0].message.content
        else:
            messages = of_anthropic(agent, timeout=0.2, max_retries=9).messages
            text = messages.create(model="claude", max_tokens=9, messages=[HI]).content[0].text  # type: ignore[union-attr]
        released.result(TIMEOUT_S)
        assert text == "yes"
    agent.trains("U:hi| A:[yes|]")


def test_both_clients_read_a_text(proxy: AnyProxy, of_openai: OpenAI, of_anthropic: Anthropic) -> None:
    with proxy.episode("yes", "no") as agent:
        asked: Any = {"model": agent.model, "max_tokens": MAX_TOKENS, "messages": [HI]}
        agent.needs(CHAT)
        chat = of_openai(agent).chat.completions.create(**asked)
        agent.needs(MESSAGES)
        message = of_anthropic(agent).messages.create(**asked)
        texts = [chat.choices[0].message.content, *(block.text for block in message.content)]
        assert all(texts)
        agent.scripted(texts, ["yes", "no"])
    agent.trains("U:hi| A:[yes|]", "U:hi| A:[no|]")
