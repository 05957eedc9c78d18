"""Kill an evaluation at random moments and resume it: the table must equal that of an uninterrupted one.

    python benchmarks/evidence/environments/killed_evaluation.py

A random policy plays 2,000 levels of Sokoban, and is killed (-9) ten times.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # the folder of `record`
from record import Evidence, parser

from envkit import clock

NAME = "killed-evaluation"
STALE_AFTER = ("envkit/wiring/evaluation", "trainer_bridge/evaluation", "trainer_bridge/rollout", "envkit/runs")
TWIN = "tests/cli/test_eval.py::test_the_same_command_resumes_a_killed_evaluation"
EPISODES, KILLS = 2000, 10
COMMAND = ("eval", "Sokoban-v0", "--policy", "random", "--episodes", str(EPISODES), "--json", "--output")


def killed() -> dict[str, Any]:
    draw = random.Random(7)
    with TemporaryDirectory() as place:
        whole, whole_s = _finished(Path(place) / "whole")
        parts, kept = Path(place) / "parts", []
        for _ in range(KILLS):
            before = _lines(parts)
            with subprocess.Popen(_words(parts), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as running:
                while _lines(parts) == before and running.poll() is None:
                    Event().wait(0.01)
                Event().wait(draw.uniform(0.0, whole_s / KILLS))
                running.kill()
            kept.append(_lines(parts))
        found, _ = _finished(parts)
    same = {
        name: found[name] == whole[name] for name in ("metrics", "endings", "episodes", "by_difficulty", "task_set")
    }
    return {"episodes_after_each_kill": kept, "equal": same, "metrics": whole["metrics"]}


def _words(folder: Path) -> list[str]:
    return [sys.executable, "-m", "envkit", *COMMAND, str(folder)]


def _finished(folder: Path) -> tuple[dict[str, Any], float]:
    began = clock.stopwatch()
    done = subprocess.run(_words(folder), capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found, clock.stopwatch() - began


def _lines(folder: Path) -> int:
    file = folder / "episodes.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def main() -> None:
    asked = parser(__doc__, NAME).parse_args()
    evidence = Evidence(NAME, stale_after=STALE_AFTER, folder=asked.folder, fresh=asked.fresh)
    figures = evidence.part("random", killed)
    sys.exit(not all(figures["equal"].values()))


if __name__ == "__main__":
    main()
