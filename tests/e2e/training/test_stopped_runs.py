"""A short form of the evidence program that kills runs at random moments: one kill -9 of a small run."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).resolve().parents[3] / "benchmarks" / "evidence" / "stopping.py"


def test_a_run_that_is_killed_loses_nothing_since_its_last_checkpoint(tmp_path: Path) -> None:
    command = [sys.executable, str(PROGRAM), "--short", "--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    parts = json.loads((tmp_path / "stopping.json").read_text())["parts"]
    (name, part), *others = parts.items()
    assert (name, others) == ("kill-0", [])
    assert part["figures"]["exit_code"] == -signal.SIGKILL
    assert part["figures"]["same_as_unbroken"]
    assert part["figures"]["processes_left"] == []
