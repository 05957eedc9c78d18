"""Output of commands: lines and aligned columns for people, JSON for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, TypeAlias

import typer

from envkit.runs.printable import printable
from envkit.types import JSON

AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print a JSON list.")]

_UNITS = (("d", 86400), ("h", 3600), ("min", 60))


def echo(text: object = "", *, err: bool = False, end: str = "\n") -> None:
    """Print `text`, which may be of others: see `printable`. Commands print with this function only."""
    if (stream := sys.stderr if err else sys.stdout) is not None:  # None: the caller closed it
        print(printable(str(text)), end=end, file=stream, flush=True)


def note(line: object) -> None:
    """Print a line on standard error."""
    echo(line, err=True)


def print_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print rows below their headings, each column as wide as its widest cell."""
    lines = [[printable(cell).replace("\n", "\\n") for cell in line] for line in [headings, *rows]]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def print_json(objects: Iterable[Mapping[str, JSON]]) -> None:
    """Print a JSON list of `objects`."""
    print(json.dumps(list(objects), indent=2))  # ASCII


def duration(seconds: float) -> str:
    """Return a duration as text, such as ``90 s`` or ``47 h``: in the largest unit that gives at least 2."""
    for unit, length_s in _UNITS:
        if seconds >= 2 * length_s:
            return f"{seconds / length_s:.0f} {unit}"
    return f"{seconds:.0f} s"


def moment(at_s: float | None) -> str:
    """Return a time in seconds since 1970 as date and time in UTC; ``never`` for None."""
    return "never" if at_s is None else datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M")
