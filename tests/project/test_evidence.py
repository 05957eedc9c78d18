"""Evidence: each program of `benchmarks/evidence/` has its file in `docs/evidence/`, which says what was measured."""

from __future__ import annotations

import ast
import json
import re
from datetime import datetime
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / "benchmarks" / "evidence"
FILES = ROOT / "docs" / "evidence"


def constants(source: Path) -> dict[str, object]:
    """Return the constants that a program declares for its evidence; none for a module that is no such program."""
    found = {}
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if name in ("NAME", "STALE_AFTER", "TWIN"):
                found[name] = ast.literal_eval(node.value)
    return found


DECLARED = {str(found["NAME"]): found for source in sorted(PROGRAMS.rglob("*.py")) if (found := constants(source))}
each_program = pytest.mark.parametrize("name", DECLARED)


def test_each_file_of_evidence_has_a_program_and_each_program_its_file() -> None:
    assert sorted(path.stem for path in FILES.glob("*.json")) == sorted(DECLARED)


@each_program
def test_a_file_says_when_on_what_and_under_which_load_each_figure_was_measured(name: str) -> None:
    content = json.loads((FILES / f"{name}.json").read_text(encoding="utf-8"))

    assert re.fullmatch(r"[0-9a-f]{40}", content["commit"])
    assert isinstance(content["has_uncommitted_changes"], bool)
    assert content["command"].split()[0].endswith(".py")
    assert content["machine"].keys() == {"cores", "memory_gib", "kernel", "python"}
    assert content["stale_after"]
    assert content["parts"]
    for part in content["parts"].values():
        assert datetime.fromisoformat(part["date"]).tzinfo is not None
        assert part["load_before"] >= 0
        assert part["figures"]


@each_program
def test_a_program_names_paths_that_exist_and_a_test_that_runs_the_same_in_short(name: str) -> None:
    declared = DECLARED[name]
    paths = declared["STALE_AFTER"]
    file, _, function = str(declared["TWIN"]).partition("::")

    assert isinstance(paths, tuple)
    assert [path for path in paths if not (ROOT / path).exists()] == []
    assert f"def {function}(" in (ROOT / file).read_text(encoding="utf-8")
