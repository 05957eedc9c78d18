"""``envkit check-template``: which dialogues are rendered turn by turn as the template renders them whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from envkit import cli
from envkit.checks.template import check_template
from envkit.errors import UsageError
from envkit.trainer_bridge.models.tiny_policy import make_tokenizer
from tests.trainer_bridge.render.templates import FAMILIES, tokenizer_of
from tests.trainer_bridge.render.tool_templates import TOOL_TEMPLATES, tool_tokenizer

KEPT = {  # where an answer is not as the template would write it
    "llama3": {"answers with whitespace at the ends"},
    "qwen3": {"answers with whitespace at the ends", "thoughts"},
}
MOVED = {
    *("system prompt", "empty system prompt", "unicode", "special tokens in the system prompt"),
    *("tools and a system prompt", "special tokens in calls and results", "tool calls and texts"),
}
TOOLS = {"tools and a system prompt", "special tokens in calls and results", "tool calls and texts"}


def save(tokenizer: Any, folder: Path) -> str:
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text("{}")
    return str(folder)


@pytest.mark.parametrize("name", FAMILIES)
def test_five_kinds_of_templates_give_the_same_tokens_except_for_rewritten_turns(name: str, tmp_path: Path) -> None:
    report = check_template(save(tokenizer_of(name), tmp_path))
    found = {one.name: one.outcome for one in report.verdicts}
    kept = {dialogue for dialogue, outcome in found.items() if outcome == "answers kept"}
    moved = {dialogue for dialogue, outcome in found.items() if outcome == "new sample"}
    assert set(found.values()) <= {"same", "answers kept", "new sample"}
    assert kept == KEPT.get(name, {"answers with whitespace at the ends"} if name != "mistral" else set())
    assert moved == (MOVED if name == "mistral" else set())
    end = FAMILIES[name].end_of_turn
    assert report.stop[0] == (tokenizer_of(name).convert_tokens_to_ids(end), end)


@pytest.mark.parametrize("name", TOOL_TEMPLATES)
def test_tool_calls_and_results_are_those_of_the_template_and_calls_are_read(name: str, tmp_path: Path) -> None:
    report = check_template(save(tool_tokenizer(name), tmp_path))
    found = {one.name: one.outcome for one in report.verdicts if one.name in TOOLS}
    changed = {
        "mistral": {"tools and a system prompt": "refused", "tool calls and texts": "new sample"},
    }
    assert found == dict.fromkeys(TOOLS, "same") | changed.get(name, {})


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("hermes", "shown by the template; calls: in the template's markup; results: messages with the role tool"),
        (
            "chatml",
            (
                "ignored by the template, described in the system prompt; calls: in <tool_call> tags; "
                "results: messages with the role tool"
            ),
        ),
        ("neither", "not possible; the template shows neither tools nor a system prompt that describes them"),
    ],
)
def test_the_report_says_what_the_template_does_with_tools(
    name: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = tool_tokenizer("chatml" if name == "neither" else name)
    if name == "neither":
        refusal = "{%- if messages[0].role == 'system' -%}{{ raise_exception('no system role') }}{%- endif -%}"
        tokenizer.chat_template = refusal + tokenizer.chat_template
    with pytest.raises(SystemExit) as end:
        cli.main(["check-template", save(tokenizer, tmp_path)])
    assert not end.value.code
    assert capsys.readouterr().out.splitlines()[1] == f"tools: {line}"


def test_a_template_that_ends_calls_in_another_way_than_texts_differs(tmp_path: Path) -> None:
    tokenizer = tool_tokenizer("hermes")
    end = "{{- '<|im_end|>\n' -}}\n  {%- elif message.role == 'user'"
    assert end in tokenizer.chat_template
    changed = end.replace("'<|im_end|>\n'", "'<|im_end|>' + ('' if message.tool_calls else '\n')")
    tokenizer.chat_template = tokenizer.chat_template.replace(end, changed)
    found = {one.name: one for one in check_template(save(tokenizer, tmp_path)).verdicts}
    assert [found[name].outcome for name in TOOLS] == ["differs"] * 3
    assert "; the template: '<|im_start|>'" in found["tool calls and texts"].seen


@pytest.mark.model
def test_smollm2_gives_the_templates_tokens_turn_by_turn_and_stops_at_the_end_of_its_turn(smollm2: Path) -> None:
    report = check_template(str(smollm2))
    assert report.stop == ((2, "<|im_end|>"),)
    assert {one.name for one in report.verdicts if one.outcome != "same"} == {"answers with whitespace at the ends"}
    assert {one.outcome for one in report.verdicts} == {"same", "answers kept"}


def test_turns_that_the_template_ends_with_text_differ_at_their_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = tokenizer_of("chatml")
    tokenizer.chat_template = (
        "{% for one in messages %}{{ one.role + '\n' + one.content + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant\n' }}{% endif %}"
    )
    with pytest.raises(SystemExit) as end:
        cli.main(["check-template", save(tokenizer, tmp_path)])
    assert end.value.code == 1
    lines = {line[:40].strip(): line[40:].split(maxsplit=1) for line in capsys.readouterr().out.splitlines()[1:]}
    assert lines["one turn"] == ["same"]
    verdict, seen = lines["two turns"]
    assert verdict == "differs"
    assert seen.endswith(" 't': '<|im_end|>' '\\n' 'user' '\\n'; the template: '\\n' 'user' '\\n' 'You'")


def test_a_model_without_a_template_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no chat template to check; training marks its answers with <answer>"):
        check_template(save(make_tokenizer(["up", "down"]), tmp_path))
    with pytest.raises(UsageError, match=r"^no model at .*nowhere; name a folder"):
        check_template(str(tmp_path / "nowhere"))
