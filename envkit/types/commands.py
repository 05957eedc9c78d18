"""What a command of an environment gives back, to be printed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

Table: TypeAlias = Sequence[Sequence[str]]
"""The headings of columns, and below them rows."""


@dataclass(frozen=True, slots=True)
class CommandResult:
    """Lines and tables to print, and whether the command exits with 0 or 1."""

    parts: Sequence[str | Table]
    is_ok: bool = True
