"""The program that chooses second bugs for a submission; see `second_bug`.

It uses only the standard library and `mutate`: to load envkit takes longer than to choose. Its input is a JSON object
with the arguments of `bugs_of`, and its output a JSON list of what that yields.
"""

from __future__ import annotations

import json
import random
import resource
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from ..mutate import Edit

_MEMORY = 2 << 30
"""Maximum bytes of this process."""
_STRONG = ("return_none", "body_removed", "not_removed", "branch_removed", "compare_flip")
"""Operators whose bugs tests mostly find, the best first."""

_Texts: TypeAlias = Mapping[str, tuple[str, str]]
"""The source in the submission and in the known fix by path."""
_Key: TypeAlias = tuple[str, str, str, str, int]
"""Path, operator, function, the new text, and how many edits before it are the same."""


def bugs_of(mutate: Any, texts: _Texts, functions: Sequence[str], seed: int) -> Iterator[tuple[str, str, str]]:
    """Yield bugs that fit both the submission and the known fix: those of the task's functions, then of others."""
    mine, known = _edits(mutate, texts, 0), _edits(mutate, texts, 1)
    chance = random.Random(seed)
    ranked = sorted(
        (key for key in mine if key in known and key[1] in _STRONG),
        key=lambda key: (key[2] not in functions, _STRONG.index(key[1]), chance.random()),
    )
    done: set[tuple[str, str]] = set()
    for key in ranked:
        path, _, function, *_ = key
        pairs = zip(texts[path], (mine[key], known[key]), strict=True)
        try:
            made = [mutate.apply(text.encode(), [edit]) for text, edit in pairs]
        except (RecursionError, MemoryError):
            continue
        if (path, function) not in done and all(made):
            done.add((path, function))
            yield (path, *(str(one, "utf-8") for one in made if one))  # type: ignore[misc]


def _edits(mutate: Any, texts: _Texts, place: int) -> dict[_Key, Edit]:
    found: dict[_Key, Edit] = {}
    for path, both in texts.items():
        seen = Counter[tuple[str, str, str]]()
        try:
            edits = mutate.edits_of(both[place].encode())
        except (RecursionError, MemoryError):
            continue
        for edit in edits:
            same = edit.operator, edit.function, edit.text
            found[(path, *same, seen[same])] = edit
            seen[same] += 1
    return found


def main(count: int, cpu_s: int) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    sys.path.append(str(Path(__file__).parents[1]))
    bugs = bugs_of(import_module("mutate"), **json.load(sys.stdin))
    json.dump(list(islice(bugs, count)), sys.stdout)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
