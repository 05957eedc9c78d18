"""What reinforcement adds: the quickstart against its own warm-up alone, given as much time.

Runs ``examples/quickstart.yaml``, then the same file with imitation only, its updates stretched by the factor by which
the whole run was longer than its warm-up. Prints held-out success of both and of the demonstrators, and their ratio.
Takes about twice as long as the quickstart.

    python benchmarks/bench_reinforcement_gain.py [SEED ...]
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from envkit.config import WarmupSection

QUICKSTART = Path(__file__).parents[1] / "examples" / "quickstart.yaml"


def run(folder: Path, seed: int, *changes: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "envkit", "train", str(QUICKSTART), "--output", str(folder)]
    for change in (f"seed={seed}", *changes):
        command += ["--set", change]
    subprocess.run(command, check=True)
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return summary


def stretched(whole: dict[str, Any]) -> list[str]:
    """The warm-up's updates, multiplied so that imitation alone takes as long as `whole` did."""
    factor = whole["wall_s"] / whole["warmup"]["wall_s"]
    updates = ("lesson_updates", "strung_updates", "episode_updates")
    longer = [f"warmup.{name}={round(getattr(WarmupSection(), name) * factor)}" for name in updates]
    return ["trainer.steps=0", "warmup.greedy_goal=1.0", *longer]


def main() -> None:
    seeds = [int(word) for word in sys.argv[1:]] or [7]
    rows = []
    with tempfile.TemporaryDirectory() as name:
        for seed in seeds:
            whole = run(Path(name) / f"whole-{seed}", seed)
            alone = run(Path(name) / f"alone-{seed}", seed, *stretched(whole))
            rows.append((seed, whole, alone))
    print("seed  demonstrators  warm-up  whole run        imitation alone   ratio")
    for seed, whole, alone in rows:
        teacher = whole["warmup"]["demonstrator_success"]
        before, after, imitated = whole["eval_success_before"], whole["eval_success_after"], alone["eval_success_after"]
        print(
            f"{seed:4}  {teacher:13.3f}  {before:7.3f}  {after:.3f} in {whole['wall_s']:4.0f} s  "
            f"{imitated:.3f} in {alone['wall_s']:4.0f} s  {after / imitated:.2f}"
        )


if __name__ == "__main__":
    main()
