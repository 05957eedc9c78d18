"""Check that every benchmark of the Makefile runs in a fresh clone, with its smallest setting.

This clones HEAD into a new folder and runs ``make`` for each target there, which also makes its virtual environment. It
records the exit code, the duration and the end of the output. It requires root and takes about 20 minutes.
The exit status is 1 if a target failed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # the folder of `record`
from record import ROOT, Evidence, run

_TARGETS = ("bench", "bench-sandboxes", "bench-fleet", "bench-many-sandboxes", "bench-false-losses")
NAME = "benchmarks-run"
STALE_AFTER = (
    "benchmarks",
    "docker",
    "envkit",
    "environments",
    "sandbox",
    "trainer_bridge",
    "Makefile",
    "pyproject.toml",
)
TWIN = "tests/project/test_benchmarks.py::test_a_benchmark_of_games_runs_and_says_which_peers_are_not_installed"
_LINES_KEPT = 8


def make(clone: Path, target: str) -> dict[str, Any]:
    """Run ``make`` for a target with its smallest setting, show the output, and return the result."""
    done = run(["make", target, "ARGS=--quick"], clone)
    return {"exit_code": done["exit_code"], "seconds": done["seconds"], "last_lines": done["lines"][-_LINES_KEPT:]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fresh", action="store_true", help="run all targets again, even if results are stored")
    settings = parser.parse_args()
    evidence = Evidence(NAME, stale_after=STALE_AFTER, fresh=settings.fresh)
    with TemporaryDirectory(prefix="envkit-clone-") as folder:
        clone = Path(folder) / "envkit"
        subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
        codes = {target: evidence.part(target, partial(make, clone, target))["exit_code"] for target in _TARGETS}
    if failed := [target for target, code in codes.items() if code]:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
