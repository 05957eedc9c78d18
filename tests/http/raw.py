"""Raw WebSocket frames, for tests of misbehaving clients."""

from __future__ import annotations

import os
import struct

UPGRADE = (
    b"GET /v1/ws HTTP/1.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)


def frame(payload: bytes) -> bytes:
    """Return a text message as a client sends it."""
    mask, size = os.urandom(4), len(payload)
    stream = (mask * (size // 4 + 1))[:size]
    masked = (int.from_bytes(payload, "big") ^ int.from_bytes(stream, "big")).to_bytes(size, "big")
    if size < 126:
        return b"\x81" + bytes([0x80 | size]) + mask + masked
    return b"\x81\xff" + struct.pack(">Q", size) + mask + masked
