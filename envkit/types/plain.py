"""JSON types, and a stable hash of JSON values."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TypeAlias

JSON: TypeAlias = bool | int | float | str | list["JSON"] | dict[str, "JSON"] | None
Info: TypeAlias = dict[str, JSON]
Options: TypeAlias = Mapping[str, JSON]


def stable_hash(*parts: JSON) -> int:
    """Return a 64-bit hash that is the same in every process and on every machine.

    Use it for seeds: Python's ``hash`` of a string differs between processes, so workers would play different levels.
    """
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
