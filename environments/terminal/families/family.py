"""What a family of generated tasks is, and how its tasks are drawn."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from envkit.types import JSON, stable_hash

T = TypeVar("T")
MAX_DIFFICULTY = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnTask:
    """A generated task of one step, played in ``/workspace``.

    Attributes:
        instruction: What the agent is asked.
        files: Files of ``/workspace`` by relative path.
        setup: Shell script that the agent's user runs once in ``/workspace`` after the files are written. It is removed
            before the episode.
        services: Shell script that starts processes when an episode begins; empty for none.
        solution: Shell script that solves the task in ``/workspace``.
        checks: What must be true at the end; see `envkit.environments.terminal.families.check`.
        programs: Programs that the task needs besides ``sh``, ``bash``, ``python3`` and the coreutils.
    """

    instruction: str
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    setup: str = ""
    services: str = ""
    solution: str
    checks: Sequence[Mapping[str, JSON]]
    programs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A family of tasks.

    Attributes:
        name: Name of the family.
        summary: What its tasks ask for, in one sentence.
        draw: Returns the task of a random number generator and a difficulty, 1 to `MAX_DIFFICULTY`. It only calls
            ``random()`` of the generator, so that a seed gives the
            same task everywhere.
        held_out: Whether the family belongs to the held-out families, which no policy should be trained on.
    """

    name: str
    summary: str
    draw: Callable[[Draw, int], DrawnTask]
    held_out: bool = False

    def task(self, seed: int, difficulty: int) -> DrawnTask:
        """Return the task of a seed and a difficulty, the same in every process."""
        return self.draw(Draw(stable_hash("terminal", self.name, seed, difficulty)), difficulty)


class Draw:
    """Random choices that are the same in every process and version of Python.

    Args:
        seed: Seed of the generator.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed).random

    def chance(self, probability: float) -> bool:
        return self._random() < probability

    def number(self, low: int, high: int) -> int:
        """Return an integer from `low` to `high`, both included."""
        return low + int(self._random() * (high - low + 1))

    def one(self, items: Sequence[T]) -> T:
        return items[int(self._random() * len(items))]

    def some(self, items: Sequence[T], count: int) -> list[T]:
        """Return `count` different items in random order."""
        rest = list(items)
        return [rest.pop(int(self._random() * len(rest))) for _ in range(count)]
