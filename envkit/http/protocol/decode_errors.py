"""Explains why a message cannot be decoded: names the field, the expected type, and the most similar valid name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

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
        structs = [one for one in _types(inspect.type_info(kind)) if isinstance(one, inspect.StructType)]
        names = {field.encode_name for one in structs for field in one.fields}
        reason = f"unknown field {found[1][:_MAX_CHARS]!r}{did_you_mean(found[1], names)}"
    elif found := _MISSING.fullmatch(text):  # library's message: msgspec
        reason = f"the field {found[1]!r} is missing"
    elif found := _PATTERN.fullmatch(text):  # library's message: msgspec
        known = {
            repr(one.type.pattern)[1:-1]: (one.extra_json_schema or {}).get("description", "")
            for one in _types(inspect.type_info(kind))
            if isinstance(one, inspect.Metadata) and isinstance(one.type, inspect.StrType)
        }
        reason = f"invalid value; must be: {known.get(found[1], found[1])}"
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


def _types(kind: inspect.Type) -> Iterator[inspect.Type]:
    """Yield the type of a message, and those of its fields, including nested ones."""
    yield kind
    inner: Iterable[inspect.Type] = ()
    if isinstance(kind, inspect.StructType):
        inner = [field.type for field in kind.fields]
    elif isinstance(kind, inspect.UnionType):
        inner = kind.types
    elif isinstance(kind, (inspect.ListType, inspect.VarTupleType)):
        inner = [kind.item_type]
    for one in inner:
        yield from _types(one)
