"""Tools that a model may call: functions whose names, docstrings and annotations describe them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import NoneType, SimpleNamespace, UnionType
from typing import Any, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

from envkit.errors import ConfigError
from envkit.protocols import Sandbox
from envkit.types import JSON, ToolSchema

ToolFunction: TypeAlias = Callable[..., str | Awaitable[str]]
"""A tool: a function or coroutine function that returns its result as text. See `tool_of`."""

_HIDDEN = ("sandbox", "timeout_s")
"""Parameters that the environment fills. A model does not see them."""
_KINDS: Mapping[object, str] = {str: "string", int: "integer", float: "number", bool: "boolean", NoneType: "null"}
_ENTRY = re.compile(r"^( *)(\w+)(?: \([^)]*\))?: *(.*)$")


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that a model may call.

    Attributes:
        parameters: JSON schema of the arguments.
        hidden: Names of the function's parameters that the environment fills.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    function: ToolFunction
    hidden: frozenset[str] = frozenset()

    @property
    def schema(self) -> ToolSchema:
        """The tool in the format of the OpenAI API."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}

    async def run(self, arguments: Mapping[str, JSON], *, sandbox: Sandbox, timeout_s: float) -> str:
        """Run the tool and return its result. Only functions with the parameter `timeout_s` know the limit."""
        filled = {"sandbox": sandbox, "timeout_s": timeout_s}
        result = self.function(**arguments, **{name: filled[name] for name in self.hidden})
        return str(await result if inspect.isawaitable(result) else result)


def tool_of(function: ToolFunction) -> Tool:
    """Return the tool that a function describes.

    The first paragraph of the docstring describes the tool, and the section ``Args:`` its parameters. The annotations
    give the types: ``str``, ``int``, ``float``, ``bool``, ``Literal[...]``, ``list[...]``, ``dict``, and unions of
    these. Parameters with a default may be left out. A parameter ``sandbox`` receives the sandbox of the episode, and
    ``timeout_s`` the number of seconds that the call may take; the model sees neither.

    Raises:
        ConfigError: The docstring or an annotation is missing, or an annotation has no JSON type.
    """
    name = getattr(function, "__name__", type(function).__name__)
    docstring = inspect.getdoc(function) if inspect.isroutine(function) else None
    if not docstring:
        raise ConfigError([f"tool {name}: needs a docstring, whose first paragraph tells the model what the tool does"])
    described = _args_section(docstring)
    parameters = inspect.signature(function).parameters
    visible = {key: one for key, one in parameters.items() if key not in _HIDDEN}
    hints = _hints(name, function, visible)
    properties: dict[str, Any] = {}
    for key, parameter in visible.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ConfigError([f"tool {name}: the parameter {key!r} must be one that can be passed by name"])
        properties[key] = _schema_of(name, key, hints[key])
        if key in described:
            properties[key]["description"] = described[key]
        if parameter.default not in (parameter.empty, None):
            properties[key]["default"] = parameter.default
    required = [key for key, one in visible.items() if one.default is one.empty]
    schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    description = " ".join(docstring.split("\n\n")[0].split())
    return Tool(name, description, schema, function, frozenset(parameters) & frozenset(_HIDDEN))


def _hints(name: str, function: ToolFunction, visible: Mapping[str, inspect.Parameter]) -> Mapping[str, object]:
    """Return the types of the visible parameters. The hidden ones may name types that only type checkers import."""
    for key, parameter in visible.items():
        if parameter.annotation is parameter.empty:
            raise ConfigError([f"tool {name}: the parameter {key!r} needs an annotation, such as {key}: str"])
    annotations = {key: parameter.annotation for key, parameter in visible.items()}
    module = inspect.unwrap(getattr(function, "__func__", function))
    try:
        return get_type_hints(SimpleNamespace(__annotations__=annotations), module.__globals__)
    except NameError as error:
        raise ConfigError([f"tool {name}: the annotations cannot be read: {error}"]) from None


def _schema_of(name: str, key: str, hint: object) -> dict[str, Any]:
    """Return the JSON schema of a type."""
    origin, inner = get_origin(hint) or hint, get_args(hint)
    if origin in _KINDS:
        return {"type": _KINDS[origin]}
    if origin is Literal:
        return {"enum": list(inner)} | ({"type": "string"} if all(isinstance(one, str) for one in inner) else {})
    if origin is list:
        return {"type": "array"} | ({"items": _schema_of(name, key, inner[0])} if inner else {})
    if origin is dict:
        return {"type": "object"}
    if origin in (Union, UnionType):
        choices = [_schema_of(name, key, one) for one in inner]
        return {"anyOf": choices}
    remedy = "use str, int, float, bool, Literal, list, dict, or a union of these"
    raise ConfigError([f"tool {name}: the type of the parameter {key!r}, {hint!r}, has no JSON schema; {remedy}"])


def _args_section(docstring: str) -> Mapping[str, str]:
    """Return the descriptions of the parameters in the section ``Args:`` of a docstring in Google's format."""
    described: dict[str, str] = {}
    lines = docstring.splitlines()
    start = next((number for number, line in enumerate(lines) if line.strip() in ("Args:", "Arguments:")), len(lines))
    indent, name = 0, ""
    for line in lines[start + 1 :]:
        if line.strip() and not line.startswith(" "):
            break  # the next section
        found = _ENTRY.match(line)
        if found and (not name or len(found[1]) <= indent):
            indent, name = len(found[1]), found[2]
            described[name] = found[3]
        elif name:
            described[name] = f"{described[name]} {line.strip()}".strip()
    return described
