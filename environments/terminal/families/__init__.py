"""Families of generated tasks: a task is a family, a seed and a difficulty."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from ..formats import write_task
from . import archives, config, git, logs, permissions, processes, queries, scripts, text, trees
from .family import Family

_MODULES = (text, trees, permissions, processes, archives, queries, logs, git, config, scripts)
FAMILIES: Mapping[str, Family] = {module.FAMILY.name: module.FAMILY for module in _MODULES}
"""All families by name."""
HELD_OUT = frozenset({"archives", "config", "logs"})
"""Names of the families that no policy should be trained on."""
_CASES = Path(__file__).parents[1] / "cases.py"


def write_drawn(family: Family, seed: int, difficulty: int, folder: Path) -> None:
    """Write a generated task as a task of Harbor into `folder`, which must be missing or empty.

    Raises:
        ValueError: There is no such difficulty.
        UsageError: The folder is not empty or cannot be written.
    """
    task = family.task(seed, difficulty)
    write_task(
        folder,
        name=f"{family.name}-{difficulty}-{seed}",
        instruction=task.instruction,
        files=task.files,
        setup=task.setup,
        services=task.services,
        solution=task.solution,
        check={"check.py": _CASES.read_text(), "cases.json": json.dumps(list(task.checks))},
        programs=task.programs,
        packages=task.programs,
        description=family.summary,
        difficulty=str(difficulty),
        category=family.name,
    )
