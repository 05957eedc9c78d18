"""Tool calls in the text of a language model.

The canonical form of a call is one line of JSON, ``{"name": "bash", "arguments": {"command": "ls"}}``. Renderers
convert the markup of their models to it. The markup ``<tool_call>{...}</tool_call>`` is also read, since renderers pass
incomplete markup on as text. If a text has several marked calls, the first counts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from envkit.errors import did_you_mean
from envkit.types import JSON, ToolSchema

_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"
_DECODER = json.JSONDecoder(strict=False)
"""Accepts line ends in strings, which models forget to escape."""
_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


class CallStatus(StrEnum):
    """Result of parsing the text of an action."""

    OK = "ok"
    INVALID_JSON = "invalid_json"
    """The call is not JSON, or not an object with a name and arguments."""
    UNCLOSED = "unclosed"
    """The call has no end, for example because the model reached its token limit."""
    UNKNOWN_TOOL = "unknown_tool"
    BAD_ARGUMENTS = "bad_arguments"
    """The arguments do not match the schema of the tool."""
    NO_CALL = "no_call"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Result of parsing an action.

    Attributes:
        status: Whether `name` and `arguments` are a valid call, or else what is wrong.
        name: Name of the tool; empty if unknown.
        arguments: The arguments by name; empty unless the status is ok.
        problem: One line for the model: what is wrong, and what to write. Empty if the status is ok.
    """

    status: CallStatus
    name: str = ""
    arguments: Mapping[str, JSON] = field(default_factory=dict)
    problem: str = ""


def write_call(name: str, **arguments: JSON) -> str:
    """Return the action that calls a tool, in the canonical form."""
    return json.dumps({"name": name, "arguments": arguments})


def parse_call(text: str, tools: Sequence[ToolSchema]) -> ToolCall:
    """Return the tool call in `text`, checked against the schemas `tools`. Text of any kind gives a result."""
    text = text.strip()
    is_marked = not text.startswith("{")
    if is_marked:
        _, is_open, text = text.partition(_OPEN)
        if not is_open:
            return _wrong(CallStatus.NO_CALL, "the answer has no tool call", tools)
        if _CLOSE not in text:
            return _wrong(CallStatus.UNCLOSED, f"the tool call has no {_CLOSE}", tools)
        text = text.lstrip()
    try:
        call, end = _DECODER.raw_decode(text)
        json.dumps(call, ensure_ascii=False, allow_nan=False).encode()  # lone surrogates cannot be encoded
    except json.JSONDecodeError as error:
        if not is_marked and (error.pos >= len(text) or not text.endswith("}")):
            return _wrong(CallStatus.UNCLOSED, "the JSON of the tool call is not complete", tools)
        return _wrong(CallStatus.INVALID_JSON, f"the tool call is not valid JSON ({error.args[0]})", tools)
    except (ValueError, RecursionError) as error:
        return _wrong(CallStatus.INVALID_JSON, f"the tool call is not valid JSON ({type(error).__name__})", tools)
    rest = text[end:].lstrip()
    if rest and not (is_marked and rest.startswith(_CLOSE)):
        return _wrong(CallStatus.INVALID_JSON, "there is text after the JSON of the tool call", tools)
    return _checked(call, tools)


def _checked(call: object, tools: Sequence[ToolSchema]) -> ToolCall:
    """Return the call that a JSON value describes."""
    name, arguments = (call.get("name"), call.get("arguments", {})) if isinstance(call, dict) else (None, None)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        reason = 'the tool call is not an object with the keys "name", a string, and "arguments", an object'
        return _wrong(CallStatus.INVALID_JSON, reason, tools)
    found = {tool["function"]["name"]: tool for tool in tools}
    if name not in found:
        reason = f"there is no tool {name[:100]!r}{did_you_mean(name, found)}"
        return ToolCall(CallStatus.UNKNOWN_TOOL, name, problem=reason)
    problem = _why_invalid(arguments, found[name]["function"]["parameters"])
    if problem is not None:
        return _wrong(CallStatus.BAD_ARGUMENTS, f"{name}: {problem}", [found[name]], name)
    return ToolCall(CallStatus.OK, name, arguments)


def _why_invalid(arguments: Mapping[str, JSON], schema: Mapping[str, Any]) -> str | None:
    """Return why `arguments` do not match a JSON schema of an object, in one line; None if they match.

    Of JSON schema, this checks ``type``, ``enum``, ``anyOf``, ``items``, ``properties`` and ``required``. Unknown names
    are wrong unless ``additionalProperties`` is true.
    """
    known: Mapping[str, Any] = schema.get("properties", {})
    for name in schema.get("required", ()):
        if name not in arguments:
            return f"the argument {name!r} is missing"
    for name, value in arguments.items():
        if name in known:
            problem = _why_invalid_value(value, known[name])
            if problem is not None:
                return f"the argument {name!r} must be {problem}"
        elif schema.get("additionalProperties") is not True:
            return f"there is no argument {name[:100]!r}{did_you_mean(name, known)}"
    return None


def _why_invalid_value(value: JSON, schema: Mapping[str, Any]) -> str | None:
    """Return the expected type or values, and the value; None if it matches the schema."""
    choices = schema.get("anyOf")
    if choices:
        problems = [_why_invalid_value(value, choice) for choice in choices]
        return None if None in problems else problems[0]
    if "enum" in schema and value not in schema["enum"]:
        return f"one of {', '.join(map(repr, schema['enum']))}, got {_short(value)}"
    kind = str(schema.get("type"))
    if kind in _TYPES and (not isinstance(value, _TYPES[kind]) or (isinstance(value, bool) and kind != "boolean")):
        return f"of type {kind}, got {_short(value)}"
    if isinstance(value, list) and "items" in schema:
        for one in value:
            problem = _why_invalid_value(one, schema["items"])
            if problem is not None:
                return f"an array whose items are {problem}"
    if isinstance(value, dict) and "properties" in schema:
        inner = _why_invalid(value, schema)
        return None if inner is None else f"an object of the tool's schema ({inner})"
    return None


def how_to_call(tools: Sequence[ToolSchema]) -> str:
    """Return one line that tells a model how to call a tool, with the first of `tools` as the example."""
    if not tools:
        return "there are no tools"
    function = tools[0]["function"]
    names = function["parameters"].get("required", ())
    example = {"name": function["name"], "arguments": dict.fromkeys(names, "...")}
    return f"to call a tool, write one JSON object, such as {json.dumps(example)}"


def _wrong(status: CallStatus, reason: str, tools: Sequence[ToolSchema], name: str = "") -> ToolCall:
    return ToolCall(status, name, problem=f"{reason}; {how_to_call(tools)}")


def _short(value: JSON) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
