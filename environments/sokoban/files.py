"""Level files: rooms as text, in the format of DeepMind's Boxoban levels.

A level is a square of characters: ``#`` wall, space floor, ``.`` target, ``$`` box, ``@`` player. As in other
level collections, ``*`` is a box on a target and ``+`` is the player on a target. Levels are separated by empty lines
or by lines that start with ``;``.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from envkit.errors import OptionError

from .rules import SYMBOLS

_THEIRS = "# .*$@+"
_OURS = str.maketrans(_THEIRS, SYMBOLS)
_LEAST, _MOST = 5, 32
"""Minimum and maximum number of cells along one side. In a smaller room every box would be in a corner."""
_MAX_BYTES = 128 << 20
"""Limit on the total size of the files in a folder. The largest folder of Boxoban has 105 MB."""


@lru_cache(maxsize=8)
def read_levels(path: str) -> tuple[str, ...]:
    """Return the boards in the file `path`. If `path` is a folder, read all its ``*.txt`` files in the order of names.

    The boards use the symbols of `SYMBOLS` and have the same size. Results are cached, so later changes to the files
    have no effect.

    Raises:
        OptionError: `path` has no levels, is unreadable or too large, or has an invalid level, whose line is named.
    """
    source = Path(path).expanduser()
    files = sorted(source.glob("*.txt")) if "\0" not in path and source.is_dir() else [source]
    levels: list[str] = []
    size = length = 0
    for file in files:
        try:
            length += file.stat().st_size
            if length > _MAX_BYTES:
                raise OptionError("level_file", f"{path} has more than {_MAX_BYTES >> 20} MiB; use fewer levels")
            text = file.read_text(encoding="utf-8-sig", errors="replace")
        except (OSError, ValueError) as error:  # a ValueError means that the name contains NUL
            why = error.strerror if isinstance(error, OSError) else error
            raise OptionError("level_file", f"cannot read {file}: {why}") from None
        for line, rows in _squares(text):
            fault = _fault(rows, size or len(rows))
            if fault:
                raise OptionError("level_file", f"{file}: the level at line {line} {fault}")
            size = len(rows)
            levels.append("\n".join(rows).translate(_OURS))
    if not levels:
        raise OptionError("level_file", f"no levels in {path}; it must be a text file, or a folder with *.txt files")
    return tuple(levels)


def _squares(text: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the levels in `text`: for each level, the number of its first line (counted from 1) and its lines."""
    rows: list[str] = []
    for number, line in enumerate([*text.split("\n"), ""], start=1):
        if line and line[0] != ";" and not line.isspace():
            rows.append(line)
        elif rows:
            yield number - len(rows), rows
            rows = []


def _fault(rows: list[str], size: int) -> str:
    """Return what is wrong with the level in `rows`; empty if the level is valid and has `size` rows."""
    level = "".join(rows)
    odd = level.strip(_THEIRS)
    if odd:
        return f"has the unknown symbol {odd[0]!r}; known are {_THEIRS!r}"
    widths = sorted({len(row) for row in rows})
    if widths != [len(rows)] or not _LEAST <= len(rows) <= _MOST:
        return f"must be a square of {_LEAST} to {_MOST} cells, got {len(rows)} lines of {widths} characters"
    if len(rows) != size:
        return f"has a different size from those before it: {len(rows)} instead of {size}"
    if (rows[0] + rows[-1] + "".join([row[0] + row[-1] for row in rows])).strip("#"):
        return "is not enclosed by walls"
    players = level.count("@") + level.count("+")
    if players != 1:
        return f"must have one player, got {players}"
    boxes = level.count("$") + level.count("*")
    targets = level.count(".") + level.count("*") + level.count("+")
    if boxes != targets:
        return f"must have as many targets as boxes, got {boxes} boxes and {targets} targets"
    return "" if "$" in level else "has no box, or is already solved"
