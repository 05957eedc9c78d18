"""Encodes and decodes frames. A frame is: length of header, length of body, header (JSON object), body (bytes)."""

from __future__ import annotations

import struct

from .json_fallback import dumps, loads

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from .json_fallback import Json

MAX_HEADER_BYTES = 1 << 20
MAX_BODY_BYTES = 1 << 16

_LENGTHS = struct.Struct(">II")


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


def _object(text: bytes) -> dict[str, Json]:
    try:
        header = loads(text.decode())
    except (ValueError, RecursionError):
        raise MalformedFrameError("a header that is not JSON") from None
    if not isinstance(header, dict):
        raise MalformedFrameError("a header that is not an object")
    return header
