"""Why a message cannot be decoded, in plain words: the field, what it must be, and the nearest name that there is."""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec
from msgspec import inspect

from envkit.errors import did_you_mean

_LONGEST = 100
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`", re.DOTALL)
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
    """Return in one line why `data` is no message of the type `kind`; `error` is what msgspec raised."""
    if isinstance(error, RecursionError):
        return "the message is nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return "the message is not JSON: it is not UTF-8"
    view = memoryview(data)
    if len(view) <= _LONGEST and not bytes(view).strip():
        return f"the message is empty; send {_wanted(kind)}"
    text, _, place = str(error).partition(" - at ")  # library's message: msgspec
    if text == "Input data was truncated":  # library's message: msgspec
        return f"the message is not JSON: it ends too early; send {_wanted(kind)}"
    if text.startswith(_MALFORMED):  # library's message: msgspec
        return f"the message is not JSON: {text.removeprefix(_MALFORMED)}"
    if found := _UNKNOWN.fullmatch(text):  # library's message: msgspec
        said = f"unknown field {found[1][:_LONGEST]!r}{did_you_mean(found[1], set(_fields(inspect.type_info(kind))))}"
    elif found := _MISSING.fullmatch(text):  # library's message: msgspec
        said = f"the field {found[1]!r} is missing"
    else:
        said = re.sub(r"`([a-z |]+)`", lambda words: _type(words[1]), text)  # library's message: msgspec
        said = said[:1].lower() + said[1:]
    field = place.replace("`", "").replace("$.", "").replace("$", "")[:_LONGEST]
    return f"{field}: {said}" if field else said


def _type(words: str) -> str:
    return " or ".join(_TYPES.get(word, word) for word in words.split(" | "))


def _wanted(kind: object) -> str:
    """Say what a message of this type looks like, by the fields that it must have."""
    found = inspect.type_info(kind)
    if isinstance(found, (inspect.ListType, inspect.VarTupleType)):
        return "a JSON list"
    if not isinstance(found, inspect.StructType):
        return "JSON"
    names = [field.encode_name for field in found.fields if field.required]
    return f"a JSON object with {', '.join(names)}" if names else "a JSON object, such as {}"


def _fields(kind: inspect.Type) -> Iterator[str]:
    """Yield the names of all fields that a message of this type, or what is in it, may have."""
    if isinstance(kind, inspect.StructType):
        for field in kind.fields:
            yield field.encode_name
            yield from _fields(field.type)
    elif isinstance(kind, inspect.UnionType):
        for one in kind.types:
            yield from _fields(one)
    elif isinstance(kind, (inspect.ListType, inspect.VarTupleType)):
        yield from _fields(kind.item_type)
