"""Conversations: which calls continue each other, whatever a client does with the messages that it sends back."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from envkit.trainer_bridge.agents.messages import ChatMessage
from tests.conformance.agents.client import CHAT, MESSAGES, RESPONSES, Json, assistant, system, user
from tests.conformance.agents.served import AnyProxy, OwnAgent, OwnProxy
from tests.trainer_bridge.agents.agents import TOOL

A, B, C = user("a?"), user("b?"), user("c?")
CALL = '<tool_call>\n{"name":  "bash", "arguments": {"command": "ls", "all": true}}\n</tool_call>'
OTHER_TOOL: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
USE = {"type": "tool_use", "id": "t", "name": "bash", "input": {"all": True, "command": "ls"}}


# --- The same message, written otherwise -----------------------------------------------------------------------------


def test_a_chat_that_grows_is_one_sample_with_the_tokens_as_they_were_sampled(proxy: AnyProxy) -> None:
    with proxy.episode("one", "two", "three") as agent:
        chat = [system("Be brief."), A]
        for question in (B, C):
            chat += [agent.ask(*chat).message, question]
        agent.ask(*chat)
    agent.trains("S:Be brief.| U:a?| A:[one|] U:b?| A:[two|] U:c?| A:[three|]")


@pytest.mark.parametrize("sent", [" one ", "one\n", "one"])
def test_an_answer_may_be_trimmed(proxy: AnyProxy, sent: str) -> None:
    with proxy.episode(sent, "two") as agent:
        agent.ask(A)
        agent.ask(A, assistant("one"), B)
    agent.trains(f"U:a?| A:[{sent}|] U:b?| A:[two|]")


@pytest.mark.parametrize("content", ["one", "<think>hm</think>one", [{"type": "text", "text": "one"}]])
def test_thoughts_may_be_removed_from_the_history(proxy: AnyProxy, content: object) -> None:
    with proxy.episode("<think>hm</think>\n\none", "two") as agent:
        first = agent.ask(A).message
        agent.scripted((first["content"], first.get("reasoning_content")), ("one", "hm"))
        agent.ask(A, assistant(content), B)
    agent.trains("U:a?| A:[<think>hm</think>\n\none|] U:b?| A:[two|]")


@pytest.mark.parametrize(
    ("arguments", "content"),
    [
        ('{"command": "ls", "all": true}', None),
        ('{"all":true,"command":"\\u006cs"}', ""),
        ({"command": "ls", "all": True}, []),
        ('{"command": "ls", "all": true}', "missing"),
    ],
)
def test_tool_calls_may_have_other_ids_and_their_arguments_another_form(
    proxy: AnyProxy, arguments: object, content: object
) -> None:
    with proxy.episode(CALL, "two") as agent:
        first = agent.ask(A, tools=[TOOL])
        agent.scripted(first.json["choices"][0]["finish_reason"], "tool_calls")
        function = {"name": "bash", "arguments": arguments}
        sent = assistant(content, tool_calls=[{"id": "x", "type": "function", "function": function}])
        if content == "missing":
            del sent["content"]
        agent.ask(A, sent, {"role": "tool", "tool_call_id": "x", "content": "f.py"}, tools=[TOOL])
    agent.trains(
        f"S:TOOLS| U:a?| A:[{CALL}|] U:<tool_response>\nf.py\n</tool_response>| A:[two|]",
    )


@pytest.mark.parametrize(("ids", "answered", "is_same"), [("pq", "pq", True), ("xy", "yx", False)])
def test_results_belong_to_tool_calls_by_position_whatever_their_ids_are(
    proxy: AnyProxy, ids: str, answered: str, is_same: bool
) -> None:
    def history(ids: str, answered: str) -> list[Json]:
        function = {"name": "bash", "arguments": '{"command": "ls", "all": true}'}
        calls = [{"id": id, "type": "function", "function": function} for id in ids]
        results = [
            {"role": "tool", "tool_call_id": id, "content": text} for id, text in zip(answered, "12", strict=True)
        ]
        return [A, assistant(None, tool_calls=calls), *results]

    with proxy.episode(CALL + CALL, "two", "three") as agent:
        agent.ask(A, tools=[TOOL])
        agent.ask(*history("xy", "xy"), tools=[TOOL])
        agent.ask(*history(ids, answered), assistant("two"), B, tools=[TOOL])
    results = " ".join(f"U:<tool_response>\n{text}\n</tool_response>|" for text in "12")
    first = f"S:TOOLS| U:a?| A:[{CALL}{CALL}|] {results} A:[two|]"
    if is_same:
        agent.trains(f"{first} U:b?| A:[three|]")
    else:
        agent.trains(first, f"S:TOOLS| U:a?| A:{CALL}{CALL}| {results} A:two| U:b?| A:[three|]")


def test_a_client_may_add_the_defaults_of_arguments(own: OwnProxy) -> None:
    tool = {
        "name": "bash",
        "input_schema": {"type": "object", "properties": {"quick": {"default": False}, "command": {}}},
    }
    call = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
    more: Any = {"route": MESSAGES, "tools": [tool]}
    with own.episode(*[call] * 3) as agent:
        chat = [A]
        for added in ({"quick": False}, {"quick": True}):
            (block,) = agent.ask(*chat, **more).json["content"]
            chat += [assistant([{**block, "input": {**block["input"], **added}}]), B]
        agent.ask(*chat, **more)
    assert [row.count("[") for row in agent.rows] == [1, 2]


@pytest.mark.parametrize(
    "text", ["<tool_call>{broken", '<tool_call>{"name": "bash", "arguments": {"comm...', CALL + "..."]
)
def test_a_call_that_is_broken_or_cut_is_text_with_the_tokens_that_were_sampled(own: OwnProxy, text: str) -> None:
    end = "" if text.endswith("...") else "|"
    with own.episode(text, "two") as agent:
        first = agent.ask(A, tools=[TOOL]).json["choices"][0]
        assert first["finish_reason"] == ("stop" if end else "length")
        agent.ask(A, first["message"], B, tools=[TOOL])
    (row,) = agent.rows
    assert f"A:[{text}{end}]" in row
    assert row.endswith("U:b?| A:[two|]")


def test_a_history_with_a_broken_call_is_read_as_text(proxy: AnyProxy) -> None:
    broken = {"id": "x", "type": "function", "function": {"name": "bash", "arguments": '{"comm'}}
    with proxy.episode("one") as agent:
        result = {"role": "tool", "tool_call_id": "x", "content": "not JSON"}
        assert agent.ask(A, assistant(None, tool_calls=[broken]), result, tools=[TOOL]).status == 200
    if isinstance(agent, OwnAgent):
        assert '"arguments": "{\\"comm"' in agent.rows[0]


@pytest.mark.parametrize("role", ["system", "developer"])
def test_the_developer_role_equals_the_system_role(proxy: AnyProxy, role: str) -> None:
    with proxy.episode("one", "two") as agent:
        agent.ask(system("Be kind."), A)
        agent.ask({"role": role, "content": [{"type": "text", "text": "Be kind."}]}, A, assistant("one"), B)
    agent.trains("S:Be kind.| U:a?| A:[one|] U:b?| A:[two|]")


# --- Branches and roots ----------------------------------------------------------------------------------------------


def test_calls_at_the_same_time_from_one_answer_are_branches_that_train_it_once(proxy: AnyProxy) -> None:
    with proxy.episode("one", "two", "two") as agent:
        first = agent.ask(A).message
        asked = [agent.begin(A, first, B), agent.begin(A, first, C)]
        assert len({one.id for one in asked}) == 2
    rows = [{f"U:a?| A:[one|] U:{x}?| A:[two|]", f"U:a?| A:one| U:{y}?| A:[two|]"} for x, y in ("bc", "cb")]
    assert not isinstance(agent, OwnAgent) or {*agent.rows} in rows


def test_several_answers_are_branches_and_each_may_be_continued(proxy: AnyProxy) -> None:
    with proxy.episode("x", "y", "z", "two") as agent:
        choices = agent.ask(A, n=3).json["choices"]
        assert [one["index"] for one in choices] == [0, 1, 2]
        continued = choices[1]["message"]
        agent.ask(A, continued, B)
    texts = {one["message"]["content"] for one in choices}
    agent.scripted(texts, {"x", "y", "z"})
    agent.trains(
        f"U:a?| A:[{continued['content']}|] U:b?| A:[two|]",
        *(f"U:a?| A:[{text}|]" for text in texts - {continued["content"]}),
    )


def test_an_answer_that_the_client_rewrote_starts_a_new_sample(proxy: AnyProxy) -> None:
    with proxy.episode("one", "two") as agent:
        agent.ask(A)
        agent.ask(A, assistant("ONE"), B)
    agent.trains("U:a?| A:[one|]", "U:a?| A:ONE| U:b?| A:[two|]")


def test_a_summary_that_replaces_the_history_is_a_new_root_and_trains_where_it_was_sampled(proxy: AnyProxy) -> None:
    with proxy.episode("one", "two", "sum", "three") as agent:
        chat = [A, agent.ask(A).message, B]
        chat += [agent.ask(*chat).message, user("Sum up.")]
        summary = agent.ask(*chat).text
        agent.ask(user(f"So far: {summary}"), C)
    agent.trains(
        "U:a?| A:[one|] U:b?| A:[two|] U:Sum up.| A:[sum|]",
        "U:So far: sum| U:c?| A:[three|]",
    )


def test_other_tools_are_another_root(proxy: AnyProxy) -> None:
    with proxy.episode("one", "two") as agent:
        first = agent.ask(A, tools=[TOOL]).message
        agent.ask(A, first, B, tools=[TOOL, OTHER_TOOL])
    assert not isinstance(agent, OwnAgent) or [row.count("[") for row in agent.rows] == [1, 1]


def test_tools_that_are_loaded_later_are_shown_where_they_were_found(own: OwnProxy) -> None:
    search, fetch = [{"name": name, "input_schema": {"type": "object"}} for name in ("search", "fetch")]
    found = user(
        [{"type": "tool_result", "tool_use_id": "t", "content": [{"type": "tool_reference", "tool_name": "fetch"}]}]
    )
    with own.episode('<tool_call>\n{"name": "search", "arguments": {}}\n</tool_call>', "two") as agent:
        blocks = agent.ask(A, route=MESSAGES, tools=[search]).json["content"]
        late = [search, {**fetch, "defer_loading": True}]
        agent.ask(A, assistant(blocks), found, route=MESSAGES, tools=late)
    (row,) = agent.rows
    assert row.endswith('{"name":"fetch","description":"","parameters":{"type":"object"}}\n</tool_response>| A:[two|]')


def test_tools_in_a_namespace_are_called_by_both_names(own: OwnProxy) -> None:
    call = '<tool_call>\n{"name": "team.spawn", "arguments": {}}\n</tool_call>'
    function = {"type": "function", "name": "spawn", "parameters": {"type": "object"}}
    more: Any = {
        "route": RESPONSES,
        "tools": [{"type": "namespace", "name": "team", "description": "", "tools": [function]}],
    }
    with own.episode(call, "two") as agent:
        (item,) = agent.ask(A, **more).json["output"]
        assert (item["name"], item["namespace"]) == ("spawn", "team")
        agent.ask(A, item, {"type": "function_call_output", "call_id": item["call_id"], "output": "ok"}, **more)
    assert agent.rows == [f"S:TOOLS| U:a?| A:[{call}|] U:<tool_response>\nok\n</tool_response>| A:[two|]"]


def test_a_system_prompt_that_changes_is_a_new_root(proxy: AnyProxy) -> None:
    with proxy.episode("one", "two") as agent:
        first = agent.ask(system("It is 1 o'clock."), A).message
        agent.ask(system("It is 2 o'clock."), A, first, B)
    agent.trains("S:It is 1 o'clock.| U:a?| A:[one|]", "S:It is 2 o'clock.| U:a?| A:one| U:b?| A:[two|]")


def test_a_changing_part_of_a_system_prompt_can_be_ignored(own: OwnProxy) -> None:
    def stable(message: ChatMessage) -> ChatMessage:
        return ChatMessage(message.role, re.sub(r"It is \d o'clock\.", "", message.content), message.calls)

    with own.episode("one", "two", stable=stable) as agent:
        first = agent.ask(system("Be kind. It is 1 o'clock."), A).message
        agent.ask(system("Be kind. It is 2 o'clock."), A, first, B)
    agent.trains("S:Be kind. | U:a?| A:[one|] U:b?| A:[two|]")


def test_the_billing_header_of_claude_code_is_ignored(proxy: AnyProxy) -> None:
    def prompt(number: int) -> list[Json]:
        texts = [f"x-anthropic-billing-header: cc_version=2; cch={number};", "Be kind."]
        return [{"type": "text", "text": text} for text in texts]

    with proxy.episode("one", "two") as agent:
        agent.ask(A, route=MESSAGES, system=prompt(1))
        agent.ask(A, assistant("one"), B, route=MESSAGES, system=prompt(2))
    agent.trains("S:Be kind.| U:a?| A:[one|] U:b?| A:[two|]")


# --- Answers that go on ----------------------------------------------------------------------------------------------


def test_text_that_the_client_appends_to_an_answer_does_not_train(proxy: AnyProxy) -> None:
    stop = {"stop": ["Observation:"]}
    with proxy.episode("do it\nObservation: made up", "fine") as agent:
        agent.scripted(agent.ask(A, **stop).text, "do it\n")
        agent.ask(A, assistant("do it\nObservation: done\n"), **stop)
    agent.trains("U:a?| A:[do it\nObservation:] done\n| A:[fine|]", stop=9)


def test_a_last_message_of_the_assistant_is_followed_by_a_new_turn(proxy: AnyProxy) -> None:
    with proxy.episode("one", "two") as agent:
        agent.ask(A)
        agent.ask(A, assistant("one"))
    agent.trains("U:a?| A:[one|] A:[two|]")


@pytest.mark.parametrize(
    ("route", "fields"),
    [(CHAT, {"prefix": True}), (CHAT, {}), (MESSAGES, {})],
)
def test_the_client_may_begin_an_answer_that_the_policy_continues(
    proxy: AnyProxy, route: str, fields: dict[str, bool]
) -> None:
    more = {"continue_final_message": True} if route == CHAT and not fields else {}
    with proxy.episode("x): y", "two") as agent:
        agent.scripted(agent.ask(A, assistant("def f( ", **fields), route=route, **more).text, "x): y")
        agent.ask(A, assistant("def f( x): y"), B, route=route)
    agent.trains("U:a?| A:def f( [x): y|] U:b?| A:[two|]")


def test_an_answer_that_was_cut_can_be_continued_in_the_same_sample(own: OwnProxy) -> None:
    with own.episode("one...", " two") as agent:
        first = agent.ask(A, route=MESSAGES)
        assert first.json["stop_reason"] == "max_tokens"
        agent.ask(A, assistant(first.text), route=MESSAGES)
    agent.trains("U:a?| A:[one... two|]")


@pytest.mark.parametrize("last", [assistant([USE]), assistant([{"type": "thinking", "thinking": "hm"}])])
def test_an_answer_that_begins_with_a_tool_call_or_thoughts_cannot_be_continued(own: OwnProxy, last: Json) -> None:
    with own.episode() as agent:
        assert agent.ask(A, last, route=MESSAGES).status == 400


# --- Responses that are stored ---------------------------------------------------------------------------------------


def test_previous_response_id_carries_messages_but_not_instructions(proxy: AnyProxy) -> None:
    with proxy.episode("one", "two", "three") as agent:
        first = agent.ask(A, route=RESPONSES, instructions="Be kind.")
        agent.ask(B, route=RESPONSES, instructions="Be kind.", previous_response_id=first.id)
        agent.ask(C, route=RESPONSES, previous_response_id=first.id)
    agent.trains("S:Be kind.| U:a?| A:[one|] U:b?| A:[two|]", "U:a?| A:one| U:c?| A:[three|]")


def test_item_references_are_resolved(proxy: AnyProxy) -> None:
    with proxy.episode("one", "two") as agent:
        (item,) = agent.ask(A, route=RESPONSES).json["output"]
        agent.ask(A, {"type": "item_reference", "id": item["id"]}, B, route=RESPONSES)
    agent.trains("U:a?| A:[one|] U:b?| A:[two|]")


def test_encrypted_reasoning_in_the_history_is_accepted(proxy: AnyProxy) -> None:
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"}
    with proxy.episode("one", "two") as agent:
        items = agent.ask(A, route=RESPONSES, store=False, include=["reasoning.encrypted_content"]).json["output"]
        agent.ask(A, thought, *items, B, route=RESPONSES, store=False)
    agent.trains("U:a?| A:[one|] U:b?| A:[two|]")


def test_an_unknown_response_id_is_refused_with_an_error_that_names_it(proxy: AnyProxy) -> None:
    with proxy.episode("one", "two") as agent:
        unstored = agent.ask(A, route=RESPONSES, store=False)
        for name in (unstored.id, "resp_x"):
            refused = agent.begin(B, route=RESPONSES, previous_response_id=name)
            assert (refused.status in (400, 404), f"{name!r}" in refused.error["message"]) == (True, True)
        refused = agent.begin({"type": "item_reference", "id": "msg_x"}, route=RESPONSES)
        assert (refused.status in (400, 404), "'msg_x'" in refused.error["message"]) == (True, True)
    agent.trains("U:a?| A:[one|]")


# --- Any agent -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_a_random_agent_has_at_most_one_sample_for_each_leaf(own: OwnProxy, seed: int) -> None:
    # A leaf is a chat, up to and with its last answer, that no other chat of the agent continues.
    rng = random.Random(seed)
    leaves: list[list[Json]] = []
    with own.episode(*(f"t{number}" for number in range(30)), *["rest"] * 30) as agent:
        for number in range(14):
            before = rng.choice(leaves) if leaves and rng.random() < 0.8 else []
            _play(agent, rng, leaves, before, number)
    distinct = [one for one in leaves if not any(other[: len(one)] == one and other is not one for other in leaves)]
    assert 0 < len(agent.rows) <= len(distinct)


def _play(agent: OwnAgent, rng: random.Random, leaves: list[list[Json]], before: list[Json], number: int) -> None:
    """Make one call that continues the messages `before`, or begins anew, and add the leaves that it makes."""
    chat = [*before, user(f"q{number}")]
    match rng.randrange(5):
        case 0:  # several answers
            leaves += [[*chat, one["message"]] for one in agent.ask(*chat, n=2).json["choices"]]
        case 1 if before:  # an answer that was rewritten
            chat[-2] = assistant("rewritten")
            leaves.append([*chat, agent.ask(*chat).message])
        case 2 if before:  # an answer that goes on with the client's text
            chat[-2] = assistant(f"{chat[-2]['content']} and more")
            leaves.append([*chat, agent.ask(*chat).message])
        case 3:  # at the same time
            asked = [agent.begin(*chat), agent.begin(*chat)]
            leaves += [[*chat, one.message] for one in asked]
        case _:
            leaves.append([*chat, agent.ask(*chat).message])
