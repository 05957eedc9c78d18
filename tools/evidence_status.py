"""List each file of evidence as fresh, stale or missing.

    python tools/evidence_status.py

A file is stale if a commit after the recorded one changed a path in its program's ``STALE_AFTER``. Uncommitted changes
do not count. The exit status is always 0.
"""

from __future__ import annotations

import ast
import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class Program:
    """A program that writes a file of evidence.

    Attributes:
        source: Path of the program.
        name: Name of the evidence file, without ``.json``.
        stale_after: Files and folders; a change to one of them makes the figures stale.
        twin: A test that makes a short version of the measurement, as ``FILE::FUNCTION``.
    """

    source: Path
    name: str
    stale_after: tuple[str, ...]
    twin: str


def programs(folder: Path = ROOT / "benchmarks" / "evidence") -> list[Program]:
    """Return the programs in `folder`, sorted by name. A program is a module with a constant ``NAME``."""
    found = []
    for source in folder.rglob("*.py"):
        constants = {}
        for node in ast.parse(source.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                constants[node.targets[0].id] = node.value
        if "NAME" in constants:
            name, paths, twin = (ast.literal_eval(constants[key]) for key in ("NAME", "STALE_AFTER", "TWIN"))
            found.append(Program(source, name, tuple(paths), twin))
    return sorted(found, key=lambda program: program.name)


def status(program: Program, root: Path = ROOT) -> str:
    """Return ``"missing"``, ``"fresh"``, or ``"stale"`` with the number of changes since, and the newest."""
    file = root / "docs" / "evidence" / f"{program.name}.json"
    if not file.exists():
        return f"missing: python {program.source.relative_to(root)}"
    commit = str(json.loads(file.read_text(encoding="utf-8"))["commit"])
    done = subprocess.run(
        ["git", "log", "--format=%h", f"{commit}..HEAD", "--", *program.stale_after],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        return f"stale: commit {commit[:10]} is unknown here"
    since = done.stdout.split()
    return f"stale: {len(since)} commits since {commit[:10]}, the newest {since[0]}" if since else "fresh"


def main() -> None:
    for program in programs():
        print(f"{program.name:20} {status(program)}")


if __name__ == "__main__":
    main()
