"""JSON-lines files of a run. Other programs can read a file while the run appends to it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import msgspec
import orjson

from envkit.errors import UsageError
from envkit.types import JSON

from .writing import replace, writing


def read_rows(path: Path) -> list[dict[str, JSON]]:
    """Return the objects of a ``.jsonl`` file, without a truncated last line. A missing file has no objects.

    Raises:
        UsageError: The file cannot be read, or a line before the last is not a JSON object.
    """
    with writing(path):
        lines = path.read_bytes().splitlines() if path.exists() else []
    rows: list[dict[str, JSON]] = []
    for number, line in enumerate(lines, 1):
        row = _parsed(line)
        if isinstance(row, dict):
            rows.append(row)
        elif number < len(lines):
            raise UsageError(f"{path}: line {number} is damaged; remove it, or start over with --force")
    return rows


def _parsed(line: bytes) -> JSON:
    try:
        return cast("JSON", orjson.loads(line))
    except orjson.JSONDecodeError:
        return None


class Rows:
    """An append-only file of JSON objects, one per line. Writes are not buffered."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with writing(path):
            self._file = path.open("ab", buffering=0)

    def append(self, row: Mapping[str, JSON]) -> None:
        rest = memoryview(encoded(row) + b"\n")
        with writing(self._path):
            while rest:
                rest = rest[self._file.write(rest) :]

    def close(self) -> None:
        self._file.close()


def replace_rows(path: Path, rows: Iterable[object]) -> None:
    """Write `rows` atomically to the JSON-lines file `path`, replacing an existing file."""
    replace(path, b"".join(encoded(row) + b"\n" for row in rows))


def keep_until(path: Path, step: int) -> None:
    """Rewrite a JSON-lines file without the lines of train steps after `step` and without a truncated last line."""
    replace_rows(path, [row for row in read_rows(path) if isinstance(at := row.get("step"), int) and at <= step])


def encoded(value: object, *, indented: bool = False) -> bytes:
    """Encode `value` as JSON. Floats are stored exactly, and non-finite values as null."""
    options = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS | (orjson.OPT_INDENT_2 if indented else 0)
    return orjson.dumps(value, default=_plain, option=options)


def _plain(value: Any) -> object:
    """Return a JSON-compatible form of `value`, because an environment's ``info`` may contain values of any type."""
    if isinstance(value, msgspec.Struct):
        return msgspec.structs.asdict(value)
    return dict(value) if isinstance(value, Mapping) else repr(value)
