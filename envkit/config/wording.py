"""Readable error messages for the problems that pydantic and PyYAML report."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml

from envkit.errors import did_you_mean

_VALUES: Mapping[str, str] = {
    "bool_type": "must be true or false",
    "dict_type": "must hold keys and values",
    "finite_number": "must be a finite number",
    "float_type": "must be a number",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "int_from_float": "must be a whole number",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "float_parsing": "must be a number",
    "bool_parsing": "must be true or false",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
    "list_type": "must be a list",
    "missing": "is missing",
    "model_type": "must hold keys and values",
    "multiple_of": "must be a multiple of {multiple_of}",
    "string_too_short": "must have at least {min_length} characters",
    "string_type": "must be text",
    "too_long": "must have at most {max_length} entries",
    "too_short": "must have at least {min_length} entries",
    "tuple_type": "must be a list",
}
"""Messages by pydantic error type."""

_YAML: Mapping[str, str] = {
    r"expected ',' or '\}'": "the '{{' of line {line}, column {column} has no '}}'",
    r"expected ',' or '\]'": "the '[' of line {line}, column {column} has no ']'",
    r"found unexpected end of stream": "the quote of line {line}, column {column} is not closed",
    r"mapping values are not allowed": "unexpected ': '; quote the value, or correct the line above",
    r"could not find expected ':'": "line {line} has no ': ' after its key",
    r"found character '\\t'": "a tab; indent with spaces",
    r"expected <block end>": "not indented like the lines above it",
}
"""Messages by regular expression of PyYAML's problem text."""


def value_problem(problem: Mapping[str, Any]) -> str:
    """Return the message for an invalid value, such as ``must be a whole number, got 'abc'``.

    Args:
        problem: One of ``pydantic.ValidationError.errors()``.
    """
    kind, context, value = problem["type"], problem.get("ctx", {}), problem.get("input")
    shown = f", got {value!r}" if isinstance(value, (str, int, float, bool)) else ""
    if kind == "literal_error":
        choices = re.findall(r"'([^']*)'", context["expected"])
        near = did_you_mean(value, choices, lists=False) if isinstance(value, str) else ""
        one_of = "" if len(choices) == 1 else "one of "
        return f"must be {one_of}{', '.join(choices)}{shown}{near}"
    bounds = {name: int(one) if isinstance(one, float) and one.is_integer() else one for name, one in context.items()}
    words = _VALUES[kind].format(**bounds) if kind in _VALUES else problem["msg"].removeprefix("Value error, ")
    return f"{words}{shown}"


def yaml_problem(error: yaml.YAMLError | UnicodeDecodeError) -> str:
    """Return the position and the problem of invalid YAML, such as ``line 2, column 5: a tab; indent with spaces``."""
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8 text (byte {error.start + 1})"
    if not isinstance(error, yaml.MarkedYAMLError):
        return "not YAML: it contains a control character"
    problem = str(error.problem)
    if (mark := error.problem_mark) is None:
        return f"not YAML: {problem}"
    began = error.context_mark or mark
    found = (words for pattern, words in _YAML.items() if re.match(pattern, problem))  # library's message: PyYAML
    words = next(found, None)
    why = problem if words is None else words.format(line=began.line + 1, column=began.column + 1)
    return f"line {mark.line + 1}, column {mark.column + 1}: not YAML: {why}"
