"""``docker/with-base`` runs its command with an image, also where that cannot be kept in the cache."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

WITH_BASE = Path(__file__).parents[2] / "docker" / "with-base"
PROGRAMS = {
    "docker": """
        case "$1 $2" in
        "image inspect") [ -e "$MADE" ];;
        "save --output") echo part >"$3"; echo "no space left on device" >&2; exit 1;;
        esac""",
    "id": "echo 0",
    "debootstrap": "exit 1",
    "base-from-debootstrap": 'touch "$MADE"',
}


def test_an_image_that_cannot_be_kept_is_used_and_leaves_no_draft(tmp_path: Path) -> None:
    shutil.copy(WITH_BASE, tmp_path)
    for name, script in PROGRAMS.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "ENVKIT_CACHE": str(tmp_path), "MADE": str(tmp_path / "made")}
    command = [str(tmp_path / "with-base"), "sh", "-c", 'test -e "$MADE" && echo ran']
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("ran\n", "")
    assert [path.suffix for path in (tmp_path / "images").iterdir()] == [".lock"]
