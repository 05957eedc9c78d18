"""Parsing of tool calls: every text has a status, and a problem tells the model what to write."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envkit.environments.tools import CallStatus, parse_call, tool_of


def search(query: str, limit: int = 5, tags: list[str] | None = None, exact: bool = False, boost: float = 1.0) -> str:
    """Search the documents."""
    raise NotImplementedError


def stop() -> str:
    """Stop."""
    raise NotImplementedError


TOOLS = [tool_of(search).schema, tool_of(stop).schema]


def call(arguments: object, name: object = "search") -> str:
    return json.dumps({"name": name, "arguments": arguments})


@pytest.mark.parametrize(
    "text",
    [
        call({"query": "a"}),
        f"  {call({'query': 'a'})}\n",
        f"<tool_call>\n{call({'query': 'a'})}\n</tool_call>",
        f"I search.\n<tool_call>{call({'query': 'a'})}</tool_call><tool_call>{call({}, 'stop')}</tool_call>",
    ],
    ids=["canonical", "white space", "marked", "the first of two"],
)
def test_a_call_is_read_in_canonical_form_and_in_markup(text: str) -> None:
    found = parse_call(text, TOOLS)
    assert (found.status, found.name, found.arguments, found.problem) == (CallStatus.OK, "search", {"query": "a"}, "")


@pytest.mark.parametrize("query", ["grep '<tool_call>' a.txt", "a </tool_call> b", "<tool_call>{}</tool_call>"])
def test_an_argument_may_contain_the_markup_of_calls(query: str) -> None:
    for text in (call({"query": query}), f"I search. <tool_call>{call({'query': query})}</tool_call>"):
        assert parse_call(text, TOOLS).arguments == {"query": query}


def test_a_string_may_contain_line_ends_that_json_would_escape() -> None:
    assert parse_call('{"name": "search", "arguments": {"query": "a\nb"}}', TOOLS).arguments == {"query": "a\nb"}


@pytest.mark.parametrize(
    ("text", "status", "problem"),
    [
        ("I am done.", CallStatus.NO_CALL, "the answer has no tool call; to call a tool, write one JSON "),
        ("", CallStatus.NO_CALL, "the answer has no tool call; "),
        ('<tool_call>{"name": "sto', CallStatus.UNCLOSED, "the tool call has no </tool_call>; "),
        ('{"name": "search", "arguments": {"query": "a', CallStatus.UNCLOSED, "the JSON of the tool call is not"),
        ("{'name': 'stop'}", CallStatus.INVALID_JSON, "the tool call is not valid JSON (Expecting property name"),
        ("<tool_call>stop</tool_call>", CallStatus.INVALID_JSON, "the tool call is not valid JSON (Expecting value"),
        ('{"tool": "stop"}', CallStatus.INVALID_JSON, "the tool call is not an object with the keys "),
        (call({}, "stop") + " Done.", CallStatus.INVALID_JSON, "there is text after the JSON of the tool call; "),
        (call({"query": "\ud800"}), CallStatus.INVALID_JSON, "the tool call is not valid JSON (UnicodeEncodeError)"),
        (call({"query": float("nan")}), CallStatus.INVALID_JSON, "the tool call is not valid JSON (ValueError)"),
        ('{"a":' * 100_000, CallStatus.INVALID_JSON, "the tool call is not valid JSON (RecursionError)"),
        (call({}, "serch"), CallStatus.UNKNOWN_TOOL, "there is no tool 'serch'; did you mean 'search'?"),
        (call({}, "walk"), CallStatus.UNKNOWN_TOOL, "there is no tool 'walk'; there are: search, stop"),
        (call({}), CallStatus.BAD_ARGUMENTS, "search: the argument 'query' is missing; to call a tool, write one JSON"),
        (call({"query": "a", "limits": 3}), CallStatus.BAD_ARGUMENTS, "search: there is no argument 'limits'; did you"),
    ],
)  # fmt: skip
def test_a_wrong_call_has_a_status_and_a_problem_in_one_line(text: str, status: CallStatus, problem: str) -> None:
    found = parse_call(text, TOOLS)
    assert (found.status, found.problem[: len(problem)]) == (status, problem)
    assert "\n" not in found.problem


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"query": 3}, "the argument 'query' must be of type string, got 3"),
        ({"query": "a", "limit": "3"}, "the argument 'limit' must be of type integer, got \"3\""),
        ({"query": "a", "limit": True}, "the argument 'limit' must be of type integer, got true"),
        ({"query": "a", "tags": "x"}, "the argument 'tags' must be of type array, got \"x\""),
        ({"query": "a", "tags": [1]}, "the argument 'tags' must be an array whose items are of type string, got 1"),
        ({"query": "a" * 99, "exact": "b" * 99}, f"the argument 'exact' must be of type boolean, got \"{'b' * 59}..."),
    ],
)
def test_arguments_are_checked_against_the_types_of_the_schema(arguments: dict[str, Any], problem: str) -> None:
    found = parse_call(call(arguments), TOOLS)
    assert found.status is CallStatus.BAD_ARGUMENTS
    assert found.problem.startswith(f"search: {problem}; to call a tool, ")


def test_integers_are_numbers_and_null_is_a_choice_of_an_optional_type() -> None:
    arguments = {"query": "a", "boost": 2, "tags": None}
    assert parse_call(call(arguments), TOOLS).arguments == arguments


@given(st.text(alphabet='{}[]":,<tool_call/>name arguments 1\\u\ud800\0', max_size=60))
def test_any_text_has_a_status(text: str) -> None:
    found = parse_call(text, TOOLS)
    assert (found.status is CallStatus.OK) == (not found.problem)
