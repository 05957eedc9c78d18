"""A virtual environment that contains only what ``make install`` installs.

It is in ``.venv/installed``, since it contains this checkout, and is made again when its inputs change.
"""

from __future__ import annotations

import fcntl
import shlex
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


@cache
def bin_folder() -> Path:
    """Return the ``bin`` folder of the virtual environment; make the environment first if it is missing or outdated."""
    commands, folder = _install_commands(), ROOT / ".venv" / "installed"
    made_from = [
        (ROOT / name).read_text(encoding="utf-8")
        for name in ("pyproject.toml", "constraints.txt", "tools/cached_venv.py")
    ]
    recipe, complete = "\n".join((sys.version, str(folder), commands, *made_from)), folder / "complete"
    folder.parent.mkdir(exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another pytest worker may be making it
        if not complete.exists() or complete.read_text(encoding="utf-8") != recipe:
            shutil.rmtree(folder, ignore_errors=True)
            _run("sh", "-ec", commands.replace(".venv", shlex.quote(str(folder))))
            complete.write_text(recipe, encoding="utf-8")
    return folder / "bin"


def _install_commands() -> str:
    """Return the commands of ``make install``, even if they have already run here."""
    python = Path(sys.executable).resolve()  # outside any virtual environment
    return _run("make", "--no-print-directory", "--always-make", "--dry-run", f"PYTHON={python}", "install")


def _run(*command: str) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command[0]} failed:\n{done.stdout}{done.stderr}"
    return done.stdout
