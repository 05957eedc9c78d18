"""Reads the ``.wandb`` files that wandb writes, since its package has no reader.

A file is a LevelDB log with a header of 7 bytes: blocks of 32 KiB with chunks, each a checksum (4 bytes), a length (2),
a type (1: whole record, 2: first part, 3: middle, 4: last) and content. A record is a protobuf message.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK = 32768
_WHOLE, _LAST = 1, 4


def records(path: Path) -> Iterator[Any]:
    """Yield the complete records of a file."""
    from wandb.proto import wandb_internal_pb2  # not while each worker of pytest collects all tests

    record: Any = vars(wandb_internal_pb2)["Record"]  # the package has no types for its messages
    data = path.read_bytes()
    assert data.startswith(b":W&B"), f"{path} is not a file of wandb"
    position, content = 7, b""
    while position + 7 <= len(data):
        if _BLOCK - position % _BLOCK < 7:  # padding
            position += _BLOCK - position % _BLOCK
            continue
        length, kind = struct.unpack_from("<HB", data, position + 4)
        content += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (_WHOLE, _LAST):
            yield record.FromString(content)
            content = b""
