"""Every benchmark of the Makefile runs in a fresh clone, with its smallest setting.

Clones the commit into a new folder and makes each target there, virtual environments included; keeps its exit code, its
seconds and the end of its output. Needs root, as Docker's tests do; takes about 20 minutes. Ends with status 1 if any
target failed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from record import ROOT, Evidence

from envkit import clock

_TARGETS = ("bench", "bench-boxes", "bench-fleet", "bench-many-boxes", "bench-false-losses")
_FILES = ("benchmarks", "docker", "envkit", "environments", "sandbox", "trainer_bridge", "Makefile", "pyproject.toml")
_LINES_KEPT = 8


def make(clone: Path, target: str) -> dict[str, Any]:
    """Make a target, show its output, and return what became of it."""
    print(f"make {target} ARGS=--quick", flush=True)
    begin = clock.stopwatch()
    command = ["make", target, "ARGS=--quick"]
    said: list[str] = []
    with subprocess.Popen(
        command, cwd=clone, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as made:
        assert made.stdout is not None
        for line in made.stdout:
            print(line, end="", flush=True)
            said = [*said, line.rstrip()][-_LINES_KEPT:]
    return {"exit_code": made.returncode, "seconds": round(clock.stopwatch() - begin), "last_lines": said}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fresh", action="store_true", help="also make again what was made on this commit")
    told = parser.parse_args()
    evidence = Evidence("benchmarks-run", stale_after=_FILES, fresh=told.fresh)
    with TemporaryDirectory(prefix="envkit-clone-") as folder:
        clone = Path(folder) / "envkit"
        subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
        codes = {target: evidence.part(target, partial(make, clone, target))["exit_code"] for target in _TARGETS}
    if failed := [target for target, code in codes.items() if code]:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
