"""A virtual environment with what ``make install`` brings, and nothing else.

It is kept outside the checkout, in ``$ENVKIT_CACHE/installed`` or ``~/.cache/envkit/installed``. The name of its folder
depends on what it is made from; a change makes another one.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


@cache
def bin_folder() -> Path:
    """Return the folder of the environment's programs, after making the environment if it is missing."""
    commands = _install_commands()
    recipe = "\n".join((sys.version, str(ROOT), (ROOT / "pyproject.toml").read_text(encoding="utf-8"), commands))
    cache = Path(os.environ.get("ENVKIT_CACHE") or Path("~/.cache/envkit").expanduser()) / "installed"
    folder = cache / hashlib.sha256(recipe.encode()).hexdigest()[:16]
    cache.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another worker or session of tests may be making it
        if not (folder / "complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
            _run("sh", "-ec", commands.replace(".venv", str(folder)))
            (folder / "complete").touch()
    return folder / "bin"


def _install_commands() -> str:
    """Return the commands of ``make install``, whether or not it has already been run here."""
    python = Path(sys.executable).resolve()  # outside any virtual environment
    return _run("make", "--no-print-directory", "--always-make", "--dry-run", f"PYTHON={python}", "install")


def _run(*command: str) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command[0]} failed:\n{done.stdout}{done.stderr}"
    return done.stdout
