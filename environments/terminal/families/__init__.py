"""Families of generated tasks: a task is a family, a seed and a difficulty."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from .family import Family

FAMILIES: Mapping[str, Family] = {}
"""All families by name."""


def write_drawn(family: Family, seed: int, difficulty: int, folder: Path) -> None:
    """Write a generated task into the empty `folder`."""
    raise NotImplementedError
