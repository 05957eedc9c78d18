"""Encodes and decodes frames. A frame is: length of header, length of body, header (JSON object), body (bytes).

The package `json` is slower to load than the whole agent, so this module calls its C scanner (`_json`).
"""

from __future__ import annotations

import struct
from _json import encode_basestring_ascii, make_scanner

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    Json = Any

MAX_HEADER_BYTES = 1 << 20
MAX_BODY_BYTES = 1 << 16

_LENGTHS = struct.Struct(">II")


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


_scan: Callable[[str, int], tuple[Json, int]] = make_scanner(_Rules)  # type: ignore[arg-type]


class MalformedFrameError(Exception):
    """The received data is not a valid frame."""


def frame(header: dict[str, Json], body: bytes | memoryview = b"") -> bytes:
    """Encode one frame; `body` has at most `MAX_BODY_BYTES`."""
    text = dumps(header).encode()
    return b"".join((_LENGTHS.pack(len(text), len(body)), text, body))


class Decoder:
    """Decodes frames from a stream that arrives in pieces of any size."""

    def __init__(self) -> None:
        self._waiting = bytearray()

    def feed(self, piece: bytes) -> Iterator[tuple[dict[str, Json], bytes]]:
        """Add the received bytes `piece`, and yield the header and the body of each frame that is now complete.

        Raises:
            MalformedFrameError: A frame is too long, or its header is not a JSON object.
        """
        waiting = self._waiting
        waiting += piece
        at = 0
        try:
            while len(waiting) - at >= _LENGTHS.size:
                header_bytes, body_bytes = _LENGTHS.unpack_from(waiting, at)
                if header_bytes > MAX_HEADER_BYTES or body_bytes > MAX_BODY_BYTES:
                    raise MalformedFrameError("too large: header %d bytes, body %d bytes" % (header_bytes, body_bytes))
                middle = at + _LENGTHS.size + header_bytes
                if len(waiting) < middle + body_bytes:
                    break
                header = _object(bytes(waiting[at + _LENGTHS.size : middle]))
                body = bytes(waiting[middle : middle + body_bytes])
                at = middle + body_bytes
                yield header, body
        finally:
            del waiting[:at]


def loads(text: str) -> Json:
    """Decode one JSON value.

    Raises:
        ValueError: `text` is not JSON.
    """
    text = text.strip(" \t\n\r")
    try:
        value, end = _scan(text, 0)
    except StopIteration:
        raise ValueError("not JSON") from None
    if end != len(text):
        raise ValueError("more than one value")
    return value


def dumps(values: dict[str, Json]) -> str:
    """Encode an object whose values are strings, numbers, booleans or None; the agent sends no others."""
    pairs = [encode_basestring_ascii(name) + ": " + _plain(value) for name, value in values.items()]
    return "{" + ", ".join(pairs) + "}"


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
    return encode_basestring_ascii(value) if isinstance(value, str) else repr(value)


def _object(text: bytes) -> dict[str, Json]:
    try:
        header = loads(text.decode())
    except (ValueError, RecursionError):
        raise MalformedFrameError("a header that is not JSON") from None
    if not isinstance(header, dict):
        raise MalformedFrameError("a header that is not an object")
    return header
