"""Encodes and decodes JSON without the package `json`.

The package `json` is slower to load than the whole agent, and reduced Pythons lack it. Decoding uses the package's C
scanner (`_json`) if available, otherwise Python's own parser. Encoding supports only objects without nested values,
because the agent sends no others.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Json = Any

_WORDS = {"null": None, "true": True, "false": False}
_SPACE = " \t\n\r"


def loads(text: str, scan: Callable[[str, int], tuple[Json, int]] | None = None) -> Json:
    """Decode one JSON value.

    Args:
        text: The JSON text.
        scan: Receives a text and the index of a value; returns the decoded value and the index of its end. None for
            the C scanner, or for `evaluate` in a Python without it.

    Raises:
        ValueError: `text` is not JSON.
    """
    text = text.strip(_SPACE)
    try:
        value, end = (scan or _scan)(text, 0)
    except (StopIteration, IndexError, SyntaxError, NameError, TypeError, MemoryError):
        raise ValueError("not JSON") from None
    if end != len(text):
        raise ValueError("more than one value")
    return value


def dumps(values: dict[str, Json]) -> str:
    """Encode an object whose values are strings, numbers, booleans or None."""
    return "{" + ", ".join([_quoted(name) + ": " + _plain(value) for name, value in values.items()]) + "}"


def encoded(text: str) -> bytes:
    """Encode a string from the host as bytes for system calls.

    Raises:
        ValueError: `text` is not a string.
    """
    if not isinstance(text, str):
        raise ValueError("expected a string")
    return text.encode("utf-8", "surrogateescape")


def _plain(value: Json) -> str:
    if value is None:
        return "null"
    if value is True or value is False:
        return "true" if value else "false"
    return _quoted(value) if isinstance(value, str) else repr(value)


class _Rules:
    """Options of the C scanner, which reads them from the attributes of this class."""

    strict = True
    object_hook = None
    object_pairs_hook = None
    parse_float = float
    parse_int = int
    memo: dict[str, str] = {}  # noqa: RUF012 - only the C scanner uses it

    @staticmethod
    def parse_constant(word: str) -> Json:
        raise ValueError(word)


def evaluate(text: str, at: int) -> tuple[Json, int]:
    """Decode the JSON `text` by evaluating it as a Python expression; return the value and the length of `text`.

    Python evaluates JSON correctly, except for the words ``true``, ``false`` and ``null``, which are defined here, and
    some escapes, which the host does not send. Evaluation is safe, because the text comes from the host.
    """
    return eval(text, {"__builtins__": {}, **_WORDS}), len(text)


def quote_plainly(text: str) -> str:
    parts = []
    for character in text:
        if character in '"\\':
            parts.append("\\" + character)
        elif " " <= character <= "~":
            parts.append(character)
        else:
            pair = character.encode("utf-16-be", "surrogatepass")
            parts += ["\\u%04x" % (pair[at] << 8 | pair[at + 1]) for at in range(0, len(pair), 2)]
    return '"' + "".join(parts) + '"'


try:
    import _json

    _quoted: Callable[[str], str] = _json.encode_basestring_ascii
    _scan: Callable[[str, int], tuple[Json, int]] = _json.make_scanner(_Rules)  # type: ignore[arg-type]
except ImportError:
    _quoted = quote_plainly
    _scan = evaluate
