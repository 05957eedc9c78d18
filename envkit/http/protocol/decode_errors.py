"""Explains why a message cannot be decoded: names the field, the expected type, and the most similar valid name."""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec
from msgspec import inspect

from envkit.errors import did_you_mean

_MAX_CHARS = 100
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`", re.DOTALL)
_PATTERN = re.compile(r"Expected `str` matching regex '(.*)'", re.DOTALL)
_MALFORMED = "JSON is malformed: "
_TYPES = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}


def explained(error: Exception, data: bytes | msgspec.Raw, kind: object) -> str:
    """Return one line that says why `data` is not a message of type `kind`.

    `error` is the exception that decoding `data` raised.
    """
    if isinstance(error, RecursionError):
        return "the message is nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return "the message is not JSON: it is not UTF-8"
    view = memoryview(data)
    if len(view) <= _MAX_CHARS and not bytes(view).strip():
        return f"the message is empty; send {_wanted(kind)}"
    text, _, path = str(error).partition(" - at ")  # library's message: msgspec
    if text == "Input data was truncated":  # library's message: msgspec
        return f"the message is not JSON: it ends too early; send {_wanted(kind)}"
    if text.startswith(_MALFORMED):  # library's message: msgspec
        return f"the message is not JSON: {text.removeprefix(_MALFORMED)}"
    if found := _UNKNOWN.fullmatch(text):  # library's message: msgspec
        reason = (
            f"unknown field {found[1][:_MAX_CHARS]!r}{did_you_mean(found[1], set(_fields(inspect.type_info(kind))))}"
        )
    elif found := _MISSING.fullmatch(text):  # library's message: msgspec
        reason = f"the field {found[1]!r} is missing"
    elif found := _PATTERN.fullmatch(text):  # library's message: msgspec
        reason = f"invalid value; must be: {dict(_patterns(inspect.type_info(kind))).get(found[1], found[1])}"
    else:
        reason = re.sub(r"`([a-z |]+)`", lambda words: _type(words[1]), text)  # library's message: msgspec
        reason = reason[:1].lower() + reason[1:]
    field = path.replace("`", "").replace("$.", "").replace("$", "")[:_MAX_CHARS]
    return f"{field}: {reason}" if field else reason


def _type(words: str) -> str:
    return " or ".join(_TYPES.get(word, word) for word in words.split(" | "))


def _wanted(kind: object) -> str:
    """Describe in words what JSON a message of this type must be: a list, or an object with its required fields."""
    found = inspect.type_info(kind)
    if isinstance(found, (inspect.ListType, inspect.VarTupleType)):
        return "a JSON list"
    if not isinstance(found, inspect.StructType):
        return "JSON"
    names = [field.encode_name for field in found.fields if field.required]
    return f"a JSON object with {', '.join(names)}" if names else "a JSON object, such as {}"


def _patterns(kind: inspect.Type) -> Iterator[tuple[str, str]]:
    """Yield a pair for each string field of a message type: its pattern, escaped as by `repr`, and its description."""
    if isinstance(kind, inspect.StructType):
        for field in kind.fields:
            yield from _patterns(field.type)
    elif isinstance(kind, inspect.UnionType):
        for member in kind.types:
            yield from _patterns(member)
    elif isinstance(kind, inspect.Metadata) and isinstance(kind.type, inspect.StrType):
        yield repr(kind.type.pattern)[1:-1], (kind.extra_json_schema or {}).get("description", "")


def _fields(kind: inspect.Type) -> Iterator[str]:
    """Yield the names of all fields of a message type, including nested ones."""
    if isinstance(kind, inspect.StructType):
        for field in kind.fields:
            yield field.encode_name
            yield from _fields(field.type)
    elif isinstance(kind, inspect.UnionType):
        for member in kind.types:
            yield from _fields(member)
    elif isinstance(kind, (inspect.ListType, inspect.VarTupleType)):
        yield from _fields(kind.item_type)
