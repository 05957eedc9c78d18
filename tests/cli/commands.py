"""Runs the installed command, as a user types it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = str(Path(sys.executable).with_name("envkit"))


def envkit(*words: str | Path, cwd: Path | None = None, stdin: str = "", **env: str) -> tuple[int, str, str]:
    """Run a command; `env` are further environment variables. Return its exit code, output and errors."""
    done = subprocess.run(
        [SCRIPT, *words],
        cwd=cwd,
        input=stdin,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr
