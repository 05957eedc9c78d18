"""Tools from functions: what a model sees of them, and which functions are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, cast

import anyio
import pytest

from envkit.environments.tools import bash, edit_file, submit, tool_of, view_file
from envkit.errors import ConfigError
from envkit.protocols import Sandbox


async def count(word: str, sandbox: Missing, unit: Literal["lines", "words"] = "words", most: int | None = None) -> str:  # type: ignore[name-defined]  # noqa: F821 - as a name that only type checkers import
    """Count the lines or words
    that contain a word.

    Only whole words count.

    Args:
        word: The word,
            in lower case.
        unit (str): What to count: lines or words.
        most: Stop there.

    Returns:
        The number.
    """
    return f"{word} {sandbox} {unit} {most}"


def test_the_schema_has_the_first_paragraph_the_types_the_defaults_and_the_descriptions_without_the_sandbox() -> None:
    assert tool_of(count).schema == {
        "type": "function",
        "function": {
            "name": "count",
            "description": "Count the lines or words that contain a word.",
            "parameters": {
                "type": "object",
                "properties": {
                    "word": {"type": "string", "description": "The word, in lower case."},
                    "unit": {
                        "enum": ["lines", "words"],
                        "type": "string",
                        "description": "What to count: lines or words.",
                        "default": "words",
                    },
                    "most": {"anyOf": [{"type": "integer"}, {"type": "null"}], "description": "Stop there."},
                },
                "required": ["word"],
                "additionalProperties": False,
            },
        },
    }


def test_the_sandbox_and_the_timeout_are_filled_in() -> None:
    def wait(sandbox: Sandbox, timeout_s: float) -> str:
        """Wait."""
        return f"{sandbox} {timeout_s}"

    async def main() -> None:
        sandbox = cast("Sandbox", "sb-1")
        assert await tool_of(wait).run({}, sandbox=sandbox, timeout_s=7.0) == "sb-1 7.0"
        assert await tool_of(count).run({"word": "a", "most": 2}, sandbox=sandbox, timeout_s=7.0) == "a sb-1 words 2"

    anyio.run(main)


def test_a_method_of_an_object_is_a_tool_without_self() -> None:
    class Dice:
        def roll(self, sides: int) -> str:
            """Roll a die."""
            return str(sides)

    assert list(tool_of(Dice().roll).parameters["properties"]) == ["sides"]


def no_docstring(word: str) -> str:
    return word


def no_annotation(word):  # type: ignore[no-untyped-def]
    """Do something."""


def no_json_type(word: complex) -> str:
    """Do something."""
    return str(word)


def many(*words: str) -> str:
    """Do something."""
    return " ".join(words)


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (no_docstring, "tool no_docstring: needs a docstring, whose first paragraph tells the model what the tool"),
        (no_annotation, "tool no_annotation: the parameter 'word' needs an annotation, such as word: str"),
        (no_json_type, "tool no_json_type: the type of the parameter 'word', <class 'complex'>, has no JSON schema; "),
        (many, "tool many: the parameter 'words' must be one that can be passed by name"),
    ],
)  # fmt: skip
def test_a_function_that_does_not_describe_a_tool_is_refused(function: Callable[..., Any], problem: str) -> None:
    with pytest.raises(ConfigError) as raised:
        tool_of(function)
    assert str(raised.value).startswith(problem)


@pytest.mark.parametrize("function", [bash, edit_file, submit, view_file])
def test_every_parameter_of_a_built_in_tool_is_described(function: Callable[..., Any]) -> None:
    tool = tool_of(function)
    assert all(one["description"] for one in tool.parameters["properties"].values())
