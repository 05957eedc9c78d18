"""Encoding of bytes in JSON.

The output of a program is encoded as a JSON string if it is valid UTF-8, so that people can read it, and otherwise as
``{"base64": "..."}``. Long output with many control characters is encoded in base64 too, because each control character
takes six bytes in a JSON string. Input from a caller (`stdin`, `content`) is always in base64.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeAlias

import msgspec

_LONG_BYTES = 64 << 10
_CONTROLS = bytes(set(range(32)) - set(b"\b\t\n\f\r"))
"""Control characters, each of which takes six bytes in JSON."""


class Base64(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bytes that are encoded in base64, because they are not valid UTF-8 or are shorter that way."""

    base64: bytes


Bytes: TypeAlias = str | Base64


def encode_argument(argument: str) -> Bytes:
    """Encode a program's argument: a string in which surrogates stand for bytes that are not UTF-8."""
    try:
        argument.encode()
    except UnicodeEncodeError:
        return Base64(os.fsencode(argument))
    return argument


def decode_arguments(arguments: Sequence[Bytes]) -> list[str]:
    """Decode the arguments of a program, which `encode_argument` has encoded."""
    return [value if isinstance(value, str) else os.fsdecode(value.base64) for value in arguments]


def encode_bytes(content: bytes) -> Bytes:
    """Encode the output of a program as a string or in base64; see the docstring of this module."""
    if len(content) > _LONG_BYTES:
        controls = len(content) - len(content.translate(None, _CONTROLS))
        if controls > len(content) >> 4:
            return Base64(content)
    try:
        return content.decode()
    except UnicodeDecodeError:
        return Base64(content)


def decode_bytes(encoded: Bytes) -> bytes:
    """Decode bytes that `encode_bytes` has encoded."""
    return encoded.encode() if isinstance(encoded, str) else encoded.base64
