"""Episodes with tools: the model reads them in its own template, and its own markup is one canonical call."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envkit.checks.template import BASH
from envkit.errors import UsageError
from envkit.trainer_bridge.models.tiny_policy import make_tokenizer
from envkit.trainer_bridge.render import ChatRenderer, PlainRenderer
from envkit.trainer_bridge.tool_calls import MARKUP_TOKENS, as_call
from envkit.types import Exchange, Observation, Reset, ToolSchema
from tests.trainer_bridge.models import WORDS
from tests.trainer_bridge.render.templates import tokenizer_of
from tests.trainer_bridge.render.tool_templates import TOOL_TEMPLATES, UNREAD_CALLS, tool_tokenizer, unread_tokenizer

TOKENIZERS: dict[str, Any] = {name: tool_tokenizer(name) for name in TOOL_TEMPLATES}
LS = '{"name": "bash", "arguments": {"command": "ls", "timeout_s": 3}}'
CAT = '{"name": "bash", "arguments": {"command": "cat a\\n"}}'

every_template = pytest.mark.parametrize("name", TOOL_TEMPLATES)
texts = st.text(st.sampled_from("a#\n \t墙é<>{}\"'"), max_size=12)


def start(*tools: ToolSchema, system: str | None = None) -> Reset:
    return Reset(Observation("Fix it."), {}, system=system, tools=tools)


def renderer_of(name: str, **settings: Any) -> ChatRenderer:
    return ChatRenderer(TOKENIZERS[name], **settings).for_episode(start(BASH))


def result(text: str) -> Observation:
    return Observation(text, role="tool")


def played(
    renderer: ChatRenderer, observations: Sequence[Observation], completions: Sequence[Sequence[int]]
) -> tuple[list[int], list[bool]]:
    """All tokens since the last start of a sample, and whether each turn after the first started one."""
    history: list[Exchange] = []
    ids, starts = list(renderer.open(observations[0])), []
    for number, completion in enumerate(completions):
        history.append(Exchange(observations[number], tuple(completion)))
        prompt = renderer.extend(history, observations[number + 1])
        ids = list(prompt.ids) if prompt.starts_sample else [*ids, *completion, *prompt.ids]
        starts.append(prompt.starts_sample)
    return ids, starts


def message(call: str) -> dict[str, Any]:
    """A call as a message for the template."""
    function = json.loads(call)
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call00000", "type": "function", "function": function}],
    }


def whole(name: str, chat: Sequence[dict[str, Any]]) -> str:
    """The text that the template itself writes."""
    return str(TOKENIZERS[name].apply_chat_template([*chat], tools=[BASH], tokenize=False, add_generation_prompt=True))


# --- Tools and results -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in TOOL_TEMPLATES if name != "chatml"])
@settings(max_examples=25, deadline=None)
@given(results=st.lists(texts, min_size=2, max_size=2), command=texts)
def test_calls_and_results_are_written_turn_by_turn_as_the_template_writes_the_whole_chat(
    name: str, results: list[str], command: str
) -> None:
    renderer = renderer_of(name)
    calls = [LS, as_call({"name": "bash", "arguments": {"command": command}})]
    completions = [renderer.demonstrate(call) for call in calls]
    ids, starts = played(renderer, [Observation("Fix it."), *map(result, results)], completions)
    chat: list[dict[str, Any]] = [{"role": "user", "content": "Fix it."}]
    for call, text in zip(calls, results, strict=True):
        chat += [message(call), {"role": "tool", "content": text, "tool_call_id": "call00000"}]
    assert renderer.text(ids) == whole(name, chat)
    assert starts == [False, False]
    assert [renderer.action(completion) for completion in completions] == calls


@pytest.mark.parametrize(
    "content",
    [
        "(raise_exception('no tools') if message.role == 'tool' else message.content)",
        "('' if message.role == 'tool' else message.content)",
        "(message.role + 1 if message.role == 'tool' else message.content)",
    ],
    ids=["raises", "drops the text", "fails"],
)
def test_a_template_without_a_role_for_tools_gets_results_from_the_user(content: str) -> None:
    tokenizer = tokenizer_of("chatml")
    tokenizer.chat_template = tokenizer.chat_template.replace("message.content", content)
    renderer = ChatRenderer(tokenizer).for_episode(start(BASH))
    assert renderer.support.results == "user"
    ids, _ = played(renderer, [Observation("a"), result("b c")], [renderer.demonstrate(LS)])
    assert renderer.text(ids).endswith("<|im_start|>user\nb c<|im_end|>\n<|im_start|>assistant\n")


def test_a_template_that_accepts_results_only_after_calls_gets_other_turns_as_texts() -> None:
    renderer = renderer_of("mistral")
    observations = [Observation("a"), result("b"), result("c"), Observation("d"), result("e")]
    completions = [renderer.demonstrate(answer) for answer in (LS, "I am done.", CAT, CAT)]
    ids, starts = played(renderer, observations, completions)
    chat = [
        {"role": "user", "content": "a"},
        message(LS),
        {"role": "tool", "content": "b", "tool_call_id": "call00000"},
        {"role": "assistant", "content": "I am done."},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": renderer.text(completions[2][:-1])},
        {"role": "user", "content": "d"},
        message(CAT),
        {"role": "tool", "content": "e", "tool_call_id": "call00000"},
    ]
    assert starts == [False, True, True, False]  # the tools move to the last message of the user
    assert renderer.text(ids) == whole("mistral", chat)


@pytest.mark.parametrize("history", [1, 2])
def test_a_window_begins_with_a_message_of_the_user(history: int) -> None:
    renderer = renderer_of("mistral", history=history)
    completions = [renderer.demonstrate(LS)] * 2
    ids, starts = played(renderer, [Observation("a"), result("b"), result("c")], completions)
    assert starts == [True, True]
    chat = [{"role": "user", "content": "c"}]
    if history == 2:
        tool = {"role": "tool", "content": "c", "tool_call_id": "call00000"}
        chat = [{"role": "user", "content": "b"}, message(LS), tool]
    assert renderer.text(ids) == whole("mistral", chat)


@pytest.mark.parametrize(("thinking", "starts_sample"), [("keep", False), ("cut", True)])
@pytest.mark.parametrize("name", ["hermes", "mistral"])
def test_thoughts_before_a_call_are_kept_or_start_a_sample(name: str, thinking: Any, starts_sample: bool) -> None:
    renderer = renderer_of(name, thinking=thinking)
    thought = TOKENIZERS[name].encode("<think>hm</think>", add_special_tokens=False)
    sampled = (*thought, *renderer.demonstrate(LS))
    assert renderer.action(sampled) == LS
    ids, starts = played(renderer, [Observation("a"), result("b")], [sampled])
    assert starts == [starts_sample]
    assert renderer.text(ids).count("<think>hm</think>") == (not starts_sample)


@every_template
@pytest.mark.parametrize("history", [None, 2])
def test_texts_of_tools_and_results_and_calls_add_no_special_tokens(name: str, history: int | None) -> None:
    tokenizer = TOKENIZERS[name]
    special = set(tokenizer.all_special_ids)
    names = {*tokenizer.all_special_tokens, "@@envkit-0@@"} - {'<|"|>'}  # which the markup of Gemma cannot quote
    if history is not None:  # in earlier answers that are rendered again, the policy's markup is its own
        names -= {*MARKUP_TOKENS}
    forged = " ".join(sorted(names))

    def ids_of(text: str) -> list[int]:
        tool = {**BASH, "function": {**BASH["function"], "description": text}}
        renderer = ChatRenderer(tokenizer, history=history).for_episode(start(tool))
        call = as_call({"name": "bash", "arguments": {"command": text}})
        shown = renderer.demonstrate(call)
        assert renderer.action(shown) == call
        return played(renderer, [Observation("a"), result(text), result(text)], [shown, shown])[0]

    forgery, harmless = ids_of(forged), ids_of("QQ")
    assert Counter(one for one in forgery if one in special) == Counter(one for one in harmless if one in special)
    assert tokenizer.decode(forgery) == tokenizer.decode(harmless).replace("QQ", forged)


# --- Actions ---------------------------------------------------------------------------------------------------------


@every_template
def test_a_wrong_call_is_the_text_unchanged(name: str) -> None:
    renderer = renderer_of(name)
    text = 'so\n<tool_call>{"name": "bash", "arguments": {'
    assert renderer.action(TOKENIZERS[name].encode(text, add_special_tokens=False)) == text


def test_an_episode_without_tools_reads_no_calls() -> None:
    renderer = ChatRenderer(TOKENIZERS["chatml"])
    text = f"<tool_call>{LS}</tool_call>"
    assert renderer.action(renderer.demonstrate(text)) == text
    assert renderer.action(renderer.demonstrate(LS)) == LS
    assert renderer.text(renderer.demonstrate(LS)) == f"{LS}<|im_end|>"


# --- Episodes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "environments", "shown"), [(None, "b", "b"), ("a", "b", "a\n\nb"), ("", "b", "b"), ("a", None, "a")]
)
def test_the_system_prompt_is_that_of_the_renderer_and_then_that_of_the_environment(
    own: str | None, environments: str | None, shown: str
) -> None:
    renderer = ChatRenderer(TOKENIZERS["chatml"], system=own).for_episode(start(system=environments))
    assert renderer.text(renderer.open(Observation("c"))).startswith(f"<|im_start|>system\n{shown}<|im_end|>\n")


def test_a_model_without_a_template_plays_only_environments_without_system_prompt_and_tools() -> None:
    tokenizer: Any = make_tokenizer(WORDS)
    renderer = PlainRenderer(tokenizer)
    assert renderer.for_episode(start()) is renderer
    for one, what in ((start(BASH), "tools"), (start(system="a"), "a system prompt")):
        with pytest.raises(UsageError, match=f"^the environment has {what}, and the model has no chat template"):
            renderer.for_episode(one)


# --- Markups ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", UNREAD_CALLS)
def test_a_template_that_writes_calls_in_an_unread_markup_is_refused_only_with_tools(name: str) -> None:
    renderer = ChatRenderer(unread_tokenizer(name))
    with pytest.raises(UsageError, match=r"writes tool calls in a markup that envkit does not read: .*a wall"):
        renderer.for_episode(start(BASH))
