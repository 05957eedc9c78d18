"""The format of a delta: the changed 16-bit words of a file against an older file of the same size.

Both files are read as little-endian 16-bit words, whatever their tensors are. A delta has one block for each
`BLOCK_WORDS` words, in order. A block is two unsigned 32-bit little-endian integers, the number of changed words and
the size of what follows in bytes, and then, unless no word has changed, a zlib stream of three parts:

1. one bit for each word of the block, the most significant bit of a byte first: 1 if it has changed. The last byte is
   filled up with zeros;
2. the low bytes of ``old XOR new`` of the changed words, in order;
3. the high bytes of the same.

A delta has no checksum: the receiver checks that of the new file.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np

BLOCK_WORDS = 1 << 22
_HEAD = struct.Struct("<II")
_WORD = np.dtype("<u2")


def fits(old: Path, new: Path) -> bool:
    """Whether a delta between two files is possible."""
    size = new.stat().st_size
    return old.is_file() and old.stat().st_size == size and size > 0 and size % _WORD.itemsize == 0


def encode(old: Path, new: Path) -> Iterator[bytes]:
    """Yield the blocks of the delta from `old` to `new`; see `fits`."""
    before, after = (np.memmap(path, _WORD, "r") for path in (old, new))
    for start in range(0, len(after), BLOCK_WORDS):
        change = before[start : start + BLOCK_WORDS] ^ after[start : start + BLOCK_WORDS]
        is_changed = change != 0
        words = change[is_changed]
        content = b""
        if words.size:
            parts = words.view(np.uint8).reshape(-1, 2).T
            content = zlib.compress(np.packbits(is_changed).tobytes() + parts.tobytes(), 1)
        yield _HEAD.pack(words.size, len(content)) + content


def decode(old: Path, delta: IO[bytes]) -> Iterator[memoryview]:
    """Yield the content of the new file.

    Raises:
        ValueError: The delta is damaged, or of another file.
    """
    before = np.memmap(old, _WORD, "r")
    for start in range(0, len(before), BLOCK_WORDS):
        words = np.array(before[start : start + BLOCK_WORDS])
        count, size = _HEAD.unpack(_exactly(delta, _HEAD.size))
        if count:
            try:
                content = np.frombuffer(zlib.decompress(_exactly(delta, size)), np.uint8)
            except zlib.error as error:
                raise ValueError(f"damaged delta: {error}") from None
            bits = -(-len(words) // 8)
            places = np.flatnonzero(np.unpackbits(content[:bits], count=len(words)))
            if len(places) != count or len(content) != bits + 2 * count:
                raise ValueError("damaged delta: it has another number of changes than it announces")
            words[places] ^= content[bits:].reshape(2, -1).T.copy().view(_WORD)[:, 0]
        yield words.data.cast("B")


def _exactly(file: IO[bytes], size: int) -> bytes:
    content = file.read(size)
    if len(content) != size:
        raise ValueError("damaged delta: it ends too early")
    return content
