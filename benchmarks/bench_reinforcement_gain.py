"""The gain from reinforcement learning: the quickstart, compared with imitation alone for the same time.

This runs ``examples/quickstart.yaml``, and then the same file without reinforcement learning. The second run makes
more imitation updates, so that it takes about as long as the first. The output is the held-out success of both runs,
their ratio, and the success of the imitated demonstrators. All takes about twice as long as the quickstart.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from settings import parsed, parser

QUICKSTART = Path(__file__).parents[1] / "examples" / "quickstart.yaml"
SMALLEST = ["trainer.steps=1", "trainer.groups_per_step=1", "env.num_envs=8", "evaluation.episodes=8"]
SMALLEST += ["imitation.states=100", "imitation.updates=12", "imitation.check_episodes=8", "threads=1"]


def run(folder: Path, seed: int, *changes: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "envkit", "train", str(QUICKSTART), "--output", str(folder)]
    for change in (f"seed={seed}", *changes):
        command += ["--set", change]
    subprocess.run(command, check=True)
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return summary


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--seeds", type=int, nargs="+", default=[7], help="seeds; each one is a row of the output")
    settings = parsed(arguments)
    changes = SMALLEST if settings.quick else []
    rows = []
    with tempfile.TemporaryDirectory() as name:
        for seed in settings.seeds:
            whole = run(Path(name) / f"whole-{seed}", seed, *changes)
            first = whole["imitation"]
            updates = round(first["updates"] * whole["wall_s"] / first["wall_s"])  # imitation alone takes the same time
            longer = ("trainer.steps=0", "imitation.goal=1.0", f"imitation.updates={updates}")
            alone = run(Path(name) / f"alone-{seed}", seed, *changes, *longer)
            rows.append((seed, whole, alone))
    print("seed  demonstrators  imitation  whole run        imitation alone   ratio")
    for seed, whole, alone in rows:
        teacher = whole["imitation"]["demonstrator_success"]
        before, after, imitated = whole["eval_success_before"], whole["eval_success_after"], alone["eval_success_after"]
        print(
            f"{seed:4}  {teacher:13.3f}  {before:9.3f}  {after:.3f} in {whole['wall_s']:4.0f} s  "
            f"{imitated:.3f} in {alone['wall_s']:4.0f} s  {after / imitated if imitated else math.inf:.2f}"
        )


if __name__ == "__main__":
    main()
