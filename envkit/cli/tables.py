"""Output of commands that print lists: aligned columns for people, JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, TypeAlias

import typer

from envkit.types import JSON

AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print a JSON list.")]

_UNITS = (("d", 86400), ("h", 3600), ("min", 60))


def print_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print rows below their headings, each column as wide as its widest cell."""
    lines = [headings, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def print_json(objects: Iterable[Mapping[str, JSON]]) -> None:
    """Print a JSON list of `objects`."""
    typer.echo(json.dumps(list(objects), indent=2))


def duration(seconds: float) -> str:
    """Return a duration as text, such as ``90 s`` or ``47 h``: in the largest unit that gives at least 2."""
    for unit, length_s in _UNITS:
        if seconds >= 2 * length_s:
            return f"{seconds / length_s:.0f} {unit}"
    return f"{seconds:.0f} s"


def moment(at_s: float | None) -> str:
    """Return a time in seconds since 1970 as date and time in UTC; ``never`` for None."""
    return "never" if at_s is None else datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M")
