"""Rows of a data set's file: JSON lines, plain or compressed with gzip, a JSON list, or parquet."""

from __future__ import annotations

import gzip
import importlib
import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from envkit.errors import ConfigError, UsageError

from ..tasks import read_lines

_PARQUET = b"PAR1"
_GZIP = b"\x1f\x8b"


def read_rows(file: Path) -> Sequence[tuple[str, Mapping[str, object]]]:
    """Return the rows of a file, each with its place for error messages, such as ``tasks.jsonl:3``.

    Raises:
        UsageError: The file cannot be read, or is a parquet file and pyarrow is not installed.
        ConfigError: The content is malformed; the message names the line.
    """
    try:
        with file.open("rb") as opened:
            start = opened.read(4)
        if start == _PARQUET:
            return [(f"{file}: row {number}", row) for number, row in enumerate(_parquet(file), 1)]
        with gzip.open(file) if start[:2] == _GZIP else file.open("rb") as plain:
            is_list = plain.read(1024).lstrip()[:1] == b"["
            plain.seek(0)
            content = plain.read() if is_list else b""
    except (OSError, EOFError) as error:
        raise UsageError(f"cannot read {file}: {error}") from None
    if not is_list:
        return [(f"{file}: row {number}", row) for number, row in enumerate(read_lines(file), 1)]
    try:
        rows = json.loads(content)
    except ValueError as error:
        raise ConfigError([f"{file}: not valid JSON: {error}"]) from None
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise ConfigError([f"{file}: row {number}: must be an object, got {json.dumps(row)[:60]}"])
    return [(f"{file}: row {number}", row) for number, row in enumerate(rows, 1)]


def _parquet(file: Path) -> Sequence[Mapping[str, object]]:
    if find_spec("pyarrow") is None:
        raise UsageError(f"{file} is a parquet file; install pyarrow to read it: pip install pyarrow")
    parquet: Any = importlib.import_module("pyarrow.parquet")
    rows: Sequence[Mapping[str, object]] = parquet.read_table(file).to_pylist()
    return rows
