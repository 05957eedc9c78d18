"""Tool calls in the markups of models: a complete call becomes one line of canonical JSON."""

from __future__ import annotations

import json

import pytest

from envkit.trainer_bridge.tool_calls import canonical_call, describe, read_call
from envkit.types import ToolSchema

EDIT: ToolSchema = {
    "type": "function",
    "function": {
        "name": "edit",
        "description": "Replace text.",
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string"}, "line": {"type": "integer"}, "all": {"type": "boolean"}},
        },
    },
}
LS = '{"name": "bash", "arguments": {"command": "ls"}}'


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>',
        'I look first.\n<tool_call>{"name":"bash","arguments":{"command":"ls"}}</tool_call> and then',
        '{"name": "bash", "parameters": {"command": "ls"}}',
        ' <|python_tag|>{"name": "bash", "parameters": {"command": "ls"}}\n',
        '{"name": "bash", "parameters": {"command": "ls"}}; {"name": "bash", "parameters": {}}',
        '[TOOL_CALLS] [{"name": "bash", "arguments": {"command": "ls"}, "id": "abcdefghi"}]',
        '[TOOL_CALLS][{"name": "bash", "arguments": {"command": "ls"}}, {"name": "other", "arguments": {}}]',
        '[TOOL_CALLS]bash[ARGS]{"command": "ls"}',
        '[TOOL_CALLS]bash[CALL_ID]abcdefghi[ARGS]{"command": "ls"}[TOOL_CALLS]other[ARGS]{}',
        "<tool_call>\n<function=bash>\n<parameter=command>\nls\n</parameter>\n</function>\n</tool_call>",
        "<function=bash><parameter=command>ls</parameter></function>",
        'I call it:\n```json\n{"name": "bash", "arguments": {"command": "ls"}}\n```\n',
        '```tool_call\n{"name": "bash", "arguments": {"command": "ls"}}\n```',
        '<|tool_call>call:bash{command:<|"|>ls<|"|>}<tool_call|>',
        '<|channel|>commentary to=functions.bash <|constrain|>json<|message|>{"command": "ls"}<|call|>',
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>bash<｜tool▁sep｜>{"command": "ls"}<｜tool▁call▁end｜>',
        '<｜tool▁call▁begin｜>function<｜tool▁sep｜>bash\n```json\n{"command": "ls"}\n```<｜tool▁call▁end｜>',
        "<tool_call>bash\n<arg_key>command</arg_key>\n<arg_value>ls</arg_value>\n</tool_call>",
        '<|tool_call_begin|>functions.bash:0<|tool_call_argument_begin|>{"command": "ls"}<|tool_call_end|>',
        '<|tool_call|>[{"name": "bash", "arguments": {"command": "ls"}}]<|/tool_call|>',
        '<TOOLCALL>[{"name": "bash", "arguments": {"command": "ls"}}]</TOOLCALL>',
        '<tool_call>{"name": "bash", "arguments": "{\\"command\\": \\"ls\\"}"}</tool_call>',
        LS,
    ],
)
def test_a_call_in_each_markup_is_the_same_line_of_json(text: str) -> None:
    assert canonical_call(text) == LS


@pytest.mark.parametrize(
    "text",
    [
        "ls",
        "",
        '<tool_call>{"name": "bash", "arguments": {"command": "ls"}}',
        '<tool_call>{"name": "bash", "arguments": {"command": "ls"',
        '<tool_call>{"name": "bash", "arguments": {"command": ls}}</tool_call>',
        '<tool_call>{"arguments": {"command": "ls"}}</tool_call>',
        '<tool_call>{"name": "bash", "arguments": ["ls"]}</tool_call>',
        '<tool_call>{"name": "bash", "arguments": {"n": NaN}}</tool_call>',
        '<tool_call>{"name": "bash", "arguments": {"n": 1e999}}</tool_call>',
        '<tool_call>{"name": "bash", "arguments": {"command": "\\ud800"}}</tool_call>',
        '<tool_call>{"name": "bash", "arguments": ' + "[" * 100_000,
        '{"name": "bash", "parameters": {"command": "ls"}} I hope',
        '[TOOL_CALLS] [{"name": "bash", "arguments": {"command": "ls"}}',
        "[TOOL_CALLS] []",
        '[TOOL_CALLS]bash[ARGS]{"command": ',
        '[TOOL_CALLS]bash[ARGS]["ls"]',
        "<function=bash><parameter=command>ls</function>",
        "<function=bash><parameter=command>ls</parameter>",
        '```json\n{"name": "bash", "arguments": {}}',
        '<|tool_call>call:bash{command:<|"|>ls<|"|>}',
        "<|tool_call>call:bash{command:ls}<tool_call|>",
        "<tool_call>bash\n<arg_key>command</arg_key>\n<arg_value>ls</arg_value>",
        '<｜tool▁call▁begin｜>bash<｜tool▁sep｜>{"command": "ls"}',
        '<|tool_call_begin|>functions.bash:0<|tool_call_argument_begin|>{"command": <|tool_call_end|>',
        '```python\n{"name": "bash", "arguments": {}}\n```',
    ],
)
def test_a_text_without_a_complete_call_has_none(text: str) -> None:
    assert canonical_call(text) is None


def test_the_first_call_counts_even_if_it_is_wrong() -> None:
    right, wrong = '<tool_call>{"name": "a"}</tool_call>', "<tool_call>{}</tool_call>"
    other = '<tool_call>{"name": "b"}</tool_call>'
    assert canonical_call(right + other) == '{"name": "a", "arguments": {}}'
    assert canonical_call(wrong + other) is None


def test_a_fenced_block_counts_only_without_another_markup() -> None:
    block = '```json\n{"name": "a"}\n```\n'
    assert canonical_call(f'{block}<tool_call>{{"name": "b"}}</tool_call>') == '{"name": "b", "arguments": {}}'


@pytest.mark.parametrize("inner", ["</tool_call>", "<function=f>", "[TOOL_CALLS]", "```json\n", "\u2028 墙 \n"])
def test_arguments_may_hold_markup_and_a_call_is_one_line(inner: str) -> None:
    arguments = {"text": inner}
    call = json.dumps({"name": "say", "arguments": arguments})
    for text in (f"<tool_call>{call}</tool_call>", call, f"[TOOL_CALLS] [{call}]"):
        found = canonical_call(text)
        assert found is not None
        assert "\n" not in found
        assert json.loads(found) == {"name": "say", "arguments": arguments}


def test_parameters_in_xml_have_the_types_of_the_tool() -> None:
    text = (
        "<function=edit>\n<parameter=path>\n12\n</parameter>\n<parameter=line>\n12\n</parameter>\n"
        "<parameter=all>\ntrue\n</parameter>\n<parameter=more>\n a\n\n</parameter>\n</function>"
    )
    expected = {"path": "12", "line": 12, "all": True, "more": " a\n"}
    assert json.loads(canonical_call(text, [EDIT]) or "") == {"name": "edit", "arguments": expected}
    assert json.loads(canonical_call(text) or "")["arguments"]["path"] == 12


def test_a_call_of_gemma_may_have_nested_values_and_braces_in_texts() -> None:
    text = '<|tool_call>call:f{a:<|"|>x, b:{"1"}<|"|>,n:-1.5,ok:true,of:{k:[1,<|"|>é<|"|>]}}<tool_call|>'
    expected = {"a": 'x, b:{"1"}', "n": -1.5, "ok": True, "of": {"k": [1, "é"]}}
    assert json.loads(canonical_call(text) or "") == {"name": "f", "arguments": expected}


def test_json_that_is_no_call_is_not_read_as_one() -> None:
    assert read_call(LS) == {"name": "bash", "arguments": {"command": "ls"}}
    assert [read_call(text) for text in ("", "up", "3", "[]", '{"name": 3}', f"{LS} {LS}")] == [None] * 6


def test_a_description_of_tools_has_their_schemas_and_a_call_that_is_read() -> None:
    text = describe([EDIT])
    assert json.dumps(EDIT["function"]) in text
    example = text.splitlines()[-1].replace('"name": ...', '"name": "edit"').replace("{...}", "{}")
    assert canonical_call(example) == '{"name": "edit", "arguments": {}}'
