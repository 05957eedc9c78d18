"""How bytes travel in JSON.

What a program wrote is bytes. It travels as a JSON string where it is UTF-8, and otherwise as ``{"base64": "..."}``, so
that nothing is lost and the usual case can be read; also where it is long and full of control characters, which a
string would make six times as long. What a caller hands in (`stdin`, `content`) is always base64.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeAlias

import msgspec

_LONG_BYTES = 64 << 10
_CONTROLS = bytes(set(range(32)) - set(b"\b\t\n\f\r"))
"""Each takes six bytes in JSON."""


class Base64(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bytes that are not UTF-8."""

    base64: bytes


Bytes: TypeAlias = str | Base64


def encode_argument(argument: str) -> Bytes:
    """Return how an argument travels, which in Python is text with escapes for what is no UTF-8."""
    try:
        argument.encode()
    except UnicodeEncodeError:
        return Base64(os.fsencode(argument))
    return argument


def decode_arguments(arguments: Sequence[Bytes]) -> list[str]:
    """Return arguments that travelled as Python has them."""
    return [one if isinstance(one, str) else os.fsdecode(one.base64) for one in arguments]


def encode_bytes(content: bytes) -> Bytes:
    """Return how bytes travel."""
    if len(content) > _LONG_BYTES:
        controls = len(content) - len(content.translate(None, _CONTROLS))
        if controls > len(content) >> 4:
            return Base64(content)
    try:
        return content.decode()
    except UnicodeDecodeError:
        return Base64(content)


def decode_bytes(told: Bytes) -> bytes:
    """Return bytes that travelled."""
    return told.encode() if isinstance(told, str) else told.base64
