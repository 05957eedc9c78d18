"""The files and commands that the documents show, and the installation of their packages."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.docs.commands import printed_in

DOCS = Path(__file__).parents[2] / "docs"
AGENTS = DOCS / "train-your-agent.md"
GUIDE = DOCS / "write-an-environment.md"
LIFT = {"lift.py", "pyproject.toml", "slow_lift.py", "totals.py"}
"""The package of the guide."""


def files_of(page: str) -> dict[str, str]:
    """Return the blocks after a line that contains only a file name and a colon."""
    blocks = re.findall(r"^`([\w.]+)`:\n\n```\w+\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    return dict(blocks)


def sections_of(page: str) -> dict[str, tuple[dict[str, str], list[str]]]:
    """Return the files and the commands of each section that prints commands, by its heading."""
    found = {}
    for section in page.split("\n## ")[1:]:
        heading = section.partition("\n")[0]
        if commands := [one.text for one in printed_in(section, heading)]:
            found[heading] = files_of(section), commands
    return found


def run(*command: str | Path, cwd: Path, **env: str) -> str:
    """Run a command, which must succeed, and return its output."""
    done = subprocess.run(command, cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def install(page: Path, names: set[str], folder: Path) -> Path:
    """Install the package that a page shows; return the folder that contains its modules."""
    source, installed = folder / "source", folder / "site-packages"
    source.mkdir()
    files = files_of(page.read_text(encoding="utf-8"))
    assert names <= set(files)
    for name in names:
        (source / name).write_text(files[name], encoding="utf-8")
    offline = ("--quiet", "--no-build-isolation", "--no-deps", "--no-index", "--disable-pip-version-check")
    run(sys.executable, "-m", "pip", "install", *offline, "--target", installed, source, cwd=folder)
    return installed
