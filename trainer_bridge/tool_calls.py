"""Tool calls in the markups of models. This module needs no torch and no chat template.

`MARKUPS` lists the markups. A call is read into one line of canonical JSON, ``{"name": ..., "arguments": {...}}``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, NoReturn

from envkit.types import ToolSchema

MARKUP_TOKENS = (
    *("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    *("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "<|python_tag|>", "<|tool_call|>", "<|/tool_call|>"),
    *("<|tool_call>", "<tool_call|>", '<|"|>'),
    *("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ),
    "<|tool_calls_section_end|>",
)
"""Parts of markups that may be special tokens of a tokenizer."""

Content = Literal["json", "list", "arguments", "gemma", "xml", "pairs"]


@dataclass(frozen=True, slots=True)
class Markup:
    """How a family of models writes a tool call.

    Attributes:
        opening: Matches the text before the call.
        closing: Matches the text after the call.
        content: What is between them: an object with ``name`` and ``arguments`` or ``parameters`` (``json``), a list
            of such objects, of which the first counts (``list``), the object of the arguments in JSON
            (``arguments``) or with Gemma's quotes (``gemma``), or elements ``<parameter=NAME>`` (``xml``) or
            ``<arg_key>`` and ``<arg_value>`` (``pairs``). Except for the first two, the opening has the group ``name``.
    """

    opening: re.Pattern[str]
    closing: re.Pattern[str]
    content: Content


def _markup(opening: str, closing: str = "", content: Content = "json") -> Markup:
    return Markup(re.compile(opening), re.compile(closing), content)


MARKUPS = (
    _markup(r"(?:<tool_call>\s*)?<function=(?P<name>[^>\s]+)>", r"\s*</function>", "xml"),  # Qwen3-Coder
    _markup(r"<tool_call>\s*(?P<name>[\w.-]+)\s*(?=<arg_key>|</tool_call>)", r"\s*</tool_call>", "pairs"),  # GLM 4.5
    _markup(r"<tool_call>\s*", r"\s*</tool_call>"),  # Hermes, Qwen
    _markup(
        r"\[TOOL_CALLS\](?P<name>[\w.-]+)(?:\[CALL_ID\]\w+)?\[ARGS\]\s*", content="arguments"
    ),  # Mistral since 2025
    _markup(r"(?:\[TOOL_CALLS\]|<\|tool_call\|>|<TOOLCALL>)\s*", content="list"),  # Mistral, Granite, Nemotron
    _markup(r'\A\s*(?:<\|python_tag\|>\s*)?(?=\{\s*")', r"\s*(?:;|\Z)"),  # Llama 3
    _markup(r"<\|tool_call>call:(?P<name>[\w.-]+)(?=\{)", r"<tool_call\|>", "gemma"),  # Gemma 4
    _markup(  # gpt-oss, from a server that does not read calls itself
        r"to=functions\.(?P<name>[\w.-]+)[^{]{0,64}?<\|message\|>\s*", r"\s*<\|call\|>", "arguments"
    ),
    _markup(  # DeepSeek V3.1 and V3
        r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?(?P<name>[\w.-]+)(?:<｜tool▁sep｜>|\s*```json)\s*",
        r"[\s`]*<｜tool▁call▁end｜>",
        "arguments",
    ),
    _markup(  # Kimi K2
        r"<\|tool_call_begin\|>\s*(?:functions\.)?(?P<name>[\w.-]+)(?::\d+)?\s*<\|tool_call_argument_begin\|>\s*",
        r"\s*<\|tool_call_end\|>",
        "arguments",
    ),
)
FALLBACK = _markup(r"```(?:json|tool_call)\s*\n\s*", r"\s*```")
"""A fenced block, for models without a markup of their own. It counts only in a text without another markup."""

_PARAMETERS = {
    "xml": re.compile(r"\s*<parameter=(?P<name>[^>\s]+)>\n?(?P<value>.*?)\n?</parameter>", re.DOTALL),
    "pairs": re.compile(r"\s*<arg_key>(?P<name>[^<]+)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>", re.DOTALL),
}
_GEMMA_QUOTE = '<|"|>'
_GEMMA_KEY = re.compile(r"([{,]\s*)([^\s{}\[\],:]+)\s*:")


def canonical_call(text: str, tools: Sequence[ToolSchema] = ()) -> str | None:
    """Return the first tool call of `text` as canonical JSON; None if it has no call, or the call is not complete.

    Args:
        text: A completion without thoughts.
        tools: The tools of the episode, for the types of arguments in XML.
    """
    return next(iter(all_calls(text, tools, most=1)[1]), None)


def all_calls(text: str, tools: Sequence[ToolSchema] = (), *, most: int = 64) -> tuple[str, list[str]]:
    """Return the text before the first tool call of `text`, and its calls up to the first broken one; see above."""
    calls: list[str] = []
    before, at = text, 0
    while len(calls) < most and (found := _calls_after(text, at, tools, is_first=not calls)) is not None:
        if not calls:
            before = text[: found.begin].rstrip()
        text, at = found.text, found.end
        calls += found.calls
    return before, calls[:most]


class _Found(NamedTuple):
    """Calls in one markup, where it begins and ends, and the text, in which Gemma's quotes were converted."""

    text: str
    begin: int
    end: int
    calls: list[str]


def _calls_after(text: str, at: int, tools: Sequence[ToolSchema], *, is_first: bool) -> _Found | None:
    opened = [(found, markup) for markup in MARKUPS if (found := markup.opening.search(text, at))]
    if not opened and is_first and (found := FALLBACK.opening.search(text)):
        opened = [(found, FALLBACK)]
    if not opened:
        return None
    opening, markup = min(opened, key=lambda one: one[0].start())  # of those that open at the same place, the first
    call: Any
    try:
        if markup.content in _PARAMETERS:
            call, end = _read_elements(text, opening, _PARAMETERS[markup.content], tools)
        else:
            if markup.content == "gemma" and is_first:  # the first call converts all
                text = text[: opening.end()] + _json_of_gemma(text[opening.end() :])
            call, end = _DECODER.raw_decode(text, opening.end())
        if markup.content in ("arguments", "gemma"):
            call = {"name": opening["name"], "arguments": call}
        calls = call if markup.content == "list" and isinstance(call, list) else [call]
        if (closing := markup.closing.match(text, end)) is None:
            return None
        return _Found(text, opening.start(), closing.end(), [as_call(one) for one in calls])
    except (ValueError, LookupError, RecursionError):
        return None


def as_call(call: Any) -> str:
    """Return `call`, an object with ``name`` and ``arguments`` or ``parameters``, as canonical JSON.

    Raises:
        ValueError: It is no such object, or contains NaN, infinity or a lone surrogate.
    """
    arguments = call.get("arguments", call.get("parameters", {})) if isinstance(call, dict) else None
    if isinstance(arguments, str):  # as in OpenAI's API
        arguments = _DECODER.decode(arguments)
    if not isinstance(arguments, dict) or not isinstance(call.get("name"), str):
        raise ValueError("not a tool call")
    line = json.dumps({"name": call["name"], "arguments": arguments}, ensure_ascii=False, allow_nan=False)
    line.encode()
    return line


def read_call(text: str) -> dict[str, Any] | None:
    """Return the name and arguments of a call in JSON; None if `text` is something else."""
    try:
        call: dict[str, Any] = json.loads(as_call(json.loads(text)))
    except (ValueError, RecursionError):
        return None
    return call


def hermes(call: str) -> str:
    """Return a call in the markup of Hermes, for models whose template has no markup."""
    return f"<tool_call>{call}</tool_call>"


def describe(tools: Sequence[ToolSchema]) -> str:
    """Return a system prompt that describes `tools`, for models whose template ignores them."""
    schemas = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    form = hermes('{"name": ..., "arguments": {...}}')
    return f"You can call these tools:\n{schemas}\nTo call a tool, answer in this format:\n{form}"


def join_prompts(*prompts: str | None) -> str | None:
    """Return system prompts as one, separated by empty lines; None if all are None."""
    given = [prompt for prompt in prompts if prompt is not None]
    return "\n\n".join(filter(None, given)) if given else None


def _json_of_gemma(text: str) -> str:
    """Return `text` with JSON strings in place of strings in Gemma's quotes and of bare keys."""
    parts = text.split(_GEMMA_QUOTE)
    parts[::2] = [_GEMMA_KEY.sub(r'\1"\2":', part) for part in parts[::2]]
    parts[1::2] = [json.dumps(part, ensure_ascii=False) for part in parts[1::2]]
    return "".join(parts)


def _read_elements(
    text: str, opening: re.Match[str], parameter: re.Pattern[str], tools: Sequence[ToolSchema]
) -> tuple[dict[str, Any], int]:
    """Return the call whose parameters begin where `opening` ends, and the position after them."""
    name, end = opening["name"], opening.end()
    types = {tool["function"]["name"]: _types(tool) for tool in tools}.get(name, {})
    arguments: dict[str, Any] = {}
    while found := parameter.match(text, end):
        arguments[found["name"]] = _value(found["value"], types.get(found["name"]))
        end = found.end()
    return {"name": name, "arguments": arguments}, end


def _types(tool: ToolSchema) -> Mapping[str, Any]:
    properties = tool["function"].get("parameters", {}).get("properties", {})
    return {name: schema.get("type") for name, schema in properties.items()}


def _value(text: str, kind: Any) -> Any:
    """Return the value of a parameter: `text` itself for a string, otherwise the JSON value if it is one."""
    if kind == "string":
        return text
    try:
        return _DECODER.decode(text)
    except ValueError:
        return text


def _reject(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_reject)
