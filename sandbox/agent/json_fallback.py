"""Encodes and decodes JSON without the package `json`.

The package `json` is slower to load than the whole agent, and reduced Pythons lack it. Decoding uses the package's C
scanner (`_json`) if available. Encoding supports only objects without nested values, because the agent sends no others.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Json = Any

_WORDS = {"null": None, "true": True, "false": False}
_ESCAPES = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", '"': '"', "\\": "\\", "/": "/"}
_SPACE = " \t\n\r"
_NUMBER = "+-.0123456789eE"


def loads(text: str, scan: Callable[[str, int], tuple[Json, int]] | None = None) -> Json:
    """Decode one JSON value.

    Args:
        text: The JSON text.
        scan: Decodes the value at an index and returns it and the index of its end; None for the default scanner.

    Raises:
        ValueError: `text` is not JSON.
    """
    text = text.strip(_SPACE)
    try:
        value, end = (scan or _scan)(text, 0)
    except (StopIteration, IndexError):
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
    """Options of the C scanner, which reads them as attributes of this class."""

    strict = True
    object_hook = None
    object_pairs_hook = None
    parse_float = float
    parse_int = int
    memo: dict[str, str] = {}  # noqa: RUF012 - only the C scanner uses it

    @staticmethod
    def parse_constant(word: str) -> Json:
        raise ValueError(word)


def scan_plainly(text: str, at: int) -> tuple[Json, int]:
    """Decode the value that begins at index `at`; return the value and the index of its end."""
    first = text[at : at + 1]
    if first == '"':
        return _string(text, at + 1)
    if first == "{":
        return _members(text, at + 1)
    if first == "[":
        return _items(text, at + 1)
    for word, value in _WORDS.items():
        if text.startswith(word, at):
            return value, at + len(word)
    end = at
    while text[end : end + 1] in _NUMBER and end < len(text):
        end += 1
    number = text[at:end]
    if not number or not number.lstrip("-")[:1].isdigit():
        raise ValueError("expected a value")
    return (float(number) if set(number) & set(".eE") else int(number)), end


def _string(text: str, at: int) -> tuple[str, int]:
    parts = []
    while True:
        quote = text.find('"', at)
        if quote < 0:
            raise ValueError("unterminated string")
        escape = text.find("\\", at, quote)
        end = quote if escape < 0 else escape
        plain = text[at:end]
        if any(character < " " for character in plain):
            raise ValueError("control character in a string")
        parts.append(plain)
        if escape < 0:
            # JSON writes a character above U+FFFF as two escapes (a surrogate pair), which are joined here.
            joined = "".join(parts)
            return joined.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass"), quote + 1
        letter = text[escape + 1]
        if letter == "u":
            parts.append(chr(int(text[escape + 2 : escape + 6], 16)))
            at = escape + 6
        elif letter in _ESCAPES:
            parts.append(_ESCAPES[letter])
            at = escape + 2
        else:
            raise ValueError("unknown escape")


def _members(text: str, at: int) -> tuple[dict[str, Json], int]:
    found: dict[str, Json] = {}
    at = _past_space(text, at)
    if text[at : at + 1] == "}":
        return found, at + 1
    while True:
        if text[at : at + 1] != '"':
            raise ValueError("a name is missing")
        name, at = _string(text, at + 1)
        at = _past_space(text, at)
        if text[at : at + 1] != ":":
            raise ValueError("a colon is missing")
        found[name], at = scan_plainly(text, _past_space(text, at + 1))
        at = _past_space(text, at)
        if text[at : at + 1] == "}":
            return found, at + 1
        if text[at : at + 1] != ",":
            raise ValueError("a comma is missing")
        at = _past_space(text, at + 1)


def _items(text: str, at: int) -> tuple[list[Json], int]:
    found: list[Json] = []
    at = _past_space(text, at)
    if text[at : at + 1] == "]":
        return found, at + 1
    while True:
        value, at = scan_plainly(text, at)
        found.append(value)
        at = _past_space(text, at)
        if text[at : at + 1] == "]":
            return found, at + 1
        if text[at : at + 1] != ",":
            raise ValueError("a comma is missing")
        at = _past_space(text, at + 1)


def _past_space(text: str, at: int) -> int:
    while text[at : at + 1] in _SPACE and at < len(text):
        at += 1
    return at


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
    _scan = scan_plainly
