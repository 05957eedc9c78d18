"""Folders with tasks for the tests of the formats."""

from __future__ import annotations

from pathlib import Path

from envkit.environments.terminal.formats import write_task

SUM_CHECK = """
from harness import WORK, read, require

def verify():
    require(read(WORK / "sum.txt").strip() == "42", "sum.txt has another sum")
"""


def write_files(folder: Path, files: dict[str, str]) -> Path:
    for path, content in files.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    return folder


def harbor(folder: Path, toml: str = "", files: dict[str, str] | None = None) -> Path:
    """Write a task of Harbor with this ``task.toml``."""
    content = {"task.toml": toml, "instruction.md": "Do it.\n", "environment/Dockerfile": "FROM debian\n"}
    return write_files(
        folder, {**content, "tests/test.sh": "#!/bin/sh\n", "solution/solve.sh": "true\n", **(files or {})}
    )


def terminal_bench(folder: Path, yaml: str = "instruction: Do it.\n", files: dict[str, str] | None = None) -> Path:
    """Write a task of Terminal-Bench 1 with this ``task.yaml``."""
    compose = "services:\n  client:\n    build: .\n    command: sleep infinity\n"
    content = {"task.yaml": yaml, "Dockerfile": "FROM debian\n", "docker-compose.yaml": compose}
    tests = {"run-tests.sh": "pytest $TEST_DIR\n", "tests/test_outputs.py": "def test(): pass\n"}
    return write_files(folder, {**content, **tests, "solution.sh": "touch done\n", **(files or {})})


def portable(folder: Path) -> Path:
    """Write a portable task of envkit: add the numbers of a file."""
    write_task(
        folder,
        name="sum",
        description='Add "numbers"\nof a file \\ and more \x7f é',
        instruction="Add the numbers in numbers.txt and write the sum to sum.txt.",
        files={"numbers.txt": "40\n", "bin/add": "#!/bin/sh\necho\n"},
        setup="echo 2 >> numbers.txt\n",
        services="(sleep 300 >/dev/null 2>&1 &)\necho 'a \"quoted\" $word'\n",
        solution='python3 -c "print(sum(map(int, open(\\"numbers.txt\\"))))" > sum.txt\n',
        check={"check.py": SUM_CHECK, "data/one.bin": b"\0\xff"},
        programs=["awk"],
        packages=["gawk"],
        difficulty="easy",
        category="text",
        cheats={"empty": ": > sum.txt\n"},
        timeout_s=30,
    )
    return folder
