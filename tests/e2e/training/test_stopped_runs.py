"""The program that stops runs at random moments, shortened to one Ctrl-C in the warm-up and one kill -9 in training."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).resolve().parents[3] / "benchmarks" / "evidence" / "stopping.py"


def test_runs_that_are_stopped_or_killed_lose_nothing_since_their_last_checkpoint(tmp_path: Path) -> None:
    command = [sys.executable, str(PROGRAM), "--short", "--jobs", "2", "--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    parts = json.loads((tmp_path / "stopping.json").read_text())["parts"]
    found = {name: part["figures"] for name, part in parts.items()}
    assert {name: figures["exit_code"] for name, figures in found.items()} == {
        "ctrl-c-0": 130,
        "kill-0": -signal.SIGKILL,
    }
    assert found["ctrl-c-0"]["resumed_in_warm_up"]
    for figures in found.values():
        assert figures["same_as_unbroken"]
        assert figures["processes_left"] == []
