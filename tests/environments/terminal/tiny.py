"""Tiny portable tasks for tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from envkit.environments.terminal.formats import write_task

CHECK = """
from harness import read, require, run

def verify():
    require(read("/workspace/answer.txt").strip() == "3", "wrong answer")
    require(run(["sh", "tool.sh"], stdin="b a").stdout == "a b", "the tool is wrong")
"""
SOLUTION = "wc -l < data.txt > answer.txt\necho 'read x y; printf \"$y $x\"' > tool.sh\n"
_STEP = """
[[steps]]
name = "{name}"
{more}
"""


def write_tiny(folder: Path, *, check: str = CHECK, services: str = "", programs: Sequence[str] = ()) -> Path:
    """Write a task to a new folder below `folder` and return its path."""
    path = folder / "tiny"
    write_task(
        path,
        name="tiny",
        instruction="Count the lines of data.txt.",
        files={"data.txt": "1\n2\n"},
        setup="echo 3 >> data.txt\n",
        solution=SOLUTION,
        check={"check.py": check},
        services=services,
        programs=programs,
        category="test",
    )
    return path


def write_steps(folder: Path, *, min_reward: float | None = None) -> Path:
    """Write a task whose two steps ask for the files ``one`` and ``two``, and return its path."""
    path = write_tiny(folder, check="def verify(): pass\n")
    (path / "instruction.md").unlink()
    more = "" if min_reward is None else f"min_reward = {min_reward}"
    with (path / "task.toml").open("a") as file:
        for name in ("one", "two"):
            file.write(_STEP.format(name=name, more=more))
            step = path / "steps" / name
            (step / "tests").mkdir(parents=True)
            (step / "instruction.md").write_text(f"Make the file {name}.\n")
            (step / "tests" / "test.sh").write_bytes((path / "tests" / "test.sh").read_bytes())
            check = f"from harness import read\ndef verify(): read('/workspace/{name}')\n"
            (step / "tests" / "check.py").write_text(check)
    return path
