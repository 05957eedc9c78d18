"""Folders of tasks: a damaged or foreign one is an error that names the line."""

from __future__ import annotations

from pathlib import Path

import pytest

from envkit.environments.swe.tasks import read_folder
from envkit.errors import ConfigError

from .tiny import task_folder


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{oops", "malformed"),
        ("[" * 100_000, ""),
        ('{"id": "x"}', "missing"),
        ("../../x", "the id must be 1 to 200"),
        ('{"id": "\udcff"}', "utf-8"),
    ],
)
def test_a_damaged_line_is_an_error_that_names_it(line: str, message: str, tmp_path: Path) -> None:
    file = task_folder(tmp_path) / "tasks.jsonl"
    good = file.read_text()
    file.write_text(good + (good.replace("tiny.0", line) if "/" in line else line), errors="surrogateescape")
    with pytest.raises(ConfigError, match=rf"tasks.jsonl:2: .*{message}"):
        read_folder(file.parent)
