"""Presets of algorithms on Sokoban 6x6 with one box, from the same imitated policy, at equal episodes.

    python benchmarks/evidence/training/algorithms.py [--runs N] [--report]

Compares GRPO, RLOO, PPO, GSPO and ReBN with five seeds each, and trains each other preset with two seeds, which are too
few for a ranking. A run has 40 train steps of 128 episodes, and every other key has the same value. Each policy then
plays the same 2,000 held-out levels with sampling. The interval of a mean holds with 95 % over seeds and levels: both
are drawn anew, 10,000 times. ``--runs`` ends the program after that many runs, and the next call continues;
``--report`` measures nothing, but draws the learning curves and prints the tables.

The imitated policy is made from its seed if it is not in the folder of the runs, which ``--work`` names. Another
processor computes other digits, and so another policy. The two comparisons may begin from different ones, but all runs
of a comparison begin from the same, so they need the same folder.

Takes about 5 minutes of one core for each of 47 runs.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

sys.path.append(str(Path(__file__).parents[1]))  # the folder of `record`
from record import ROOT, Evidence, parser

from benchmarks.training.runs import figures, interval, marks, numbers, played, train_in
from envkit.config.algorithm import PRESETS

NAME = "algorithms"
STALE_AFTER = (
    "environments/boards",
    "environments/sokoban",
    "examples/sokoban.yaml",
    "trainer_bridge/algorithms",
    "trainer_bridge/trainers",
)
TWIN = "tests/wiring/training/test_presets.py::test_a_preset_trains_without_a_finding"
RANKED = ("grpo", "rloo", "ppo", "gspo", "rebn")
OTHERS = tuple(preset for preset in PRESETS if preset not in RANKED)
COMPARISONS = (
    ("imitated policy", RANKED, (3, 7, 11, 19, 23)),
    ("imitated policy of the other presets", OTHERS, (3, 7)),
)
"""Name of the part with the policy that the runs begin from, the presets, and their seeds."""
IMITATION = ("trainer.steps=0", "evaluation.episodes=0")
REINFORCEMENT = (
    *("imitation.kind=none", "trainer.steps=40", "trainer.groups_per_step=16", "trainer.checkpoint_every=40"),
    *("evaluation.every=20", "evaluation.episodes=256"),
)
LEVELS = 2000
PICTURE = ROOT / "docs" / "pictures" / "algorithms.png"


def train(folder: Path, *changes: str) -> None:
    """Train ``examples/sokoban.yaml`` with changed keys on one thread, or continue the run in `folder`."""
    train_in(folder, ROOT / "examples" / "sokoban.yaml", *changes, threads=1)


def successes(run: Path, folder: Path) -> str:
    """Return 1 or 0 for each level that the policy of a run plays with sampling, in one text."""
    episodes = played(run, folder, "Sokoban-v0", LEVELS, {"size": 6, "boxes": 1})
    return marks(episode.outcome.success is True for episode in episodes)


def measure(preset: str, seed: int, work: Path) -> dict[str, Any]:
    """Train with a preset from the imitated policy, and return the learning curve and the levels that were solved."""
    policy = imitated(work)
    folder = work / f"{preset}-{seed}"
    train(folder, f"engine.model={policy}", f"seed={seed}", f"algorithm.preset={preset}", *REINFORCEMENT)
    return {**figures(folder), "solved": successes(folder, work / f"{preset}-{seed}-eval")}


def imitated(work: Path) -> Path:
    """Return the folder of the imitated policy, which is made first if it is missing."""
    folder = work / "imitated"
    if not (folder / "summary.json").exists():
        train(folder, *IMITATION)
    return folder / "checkpoints" / "step-0" / "policy"


def before_reinforcement(work: Path) -> dict[str, Any]:
    """Return the levels that the imitated policy solves."""
    imitated(work)
    return {"solved": successes(work / "imitated", work / "imitated-eval")}


def summary(parts: Mapping[str, Mapping[int, Any]], before: Mapping[str, Any]) -> dict[str, Any]:
    """Return mean and interval of the success with each preset that has runs, and of the imitated policy."""
    rng = np.random.default_rng(0)
    found = {}
    for preset, runs in {"imitated policy": {0: before}, **parts}.items():
        solved = [one["solved"] for one in runs.values()]
        low, high = interval(np.stack([numbers(one) for one in solved]), rng)
        mean = float(np.mean([numbers(one) for one in solved]))
        found[preset] = {"seeds": len(solved), "success": round(mean, 4), "low": round(low, 4), "high": round(high, 4)}
    return found


def show(parts: Mapping[str, Mapping[int, Any]], before: Mapping[str, Any]) -> None:
    """Print the table of a comparison in Markdown."""
    print("| preset | seeds | success after 5,120 episodes | 95 % interval |\n|---|---|---|---|")
    for preset, row in summary(parts, before).items():
        bounds = f"{row['low']:.1%} to {row['high']:.1%}"
        print(f"| {preset} | {row['seeds']} | {row['success']:.1%} | {bounds} |")


def draw(parts: Mapping[str, Mapping[int, Any]]) -> None:
    """Draw the mean learning curves of the presets with five seeds."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for preset, runs in parts.items():
        curves = [[point["sampled"] for point in one["curve"]] for one in runs.values()]
        steps = [point["train_step"] for point in next(iter(runs.values()))["curve"]]
        axes.plot(steps, np.mean(curves, 0), label=preset, linewidth=2)
    axes.set(xlabel="train steps of 128 episodes", ylabel="success on 256 held-out levels, sampled")
    axes.legend(fontsize="small")
    figure.savefig(PICTURE, dpi=110)


def main() -> None:
    arguments = parser(__doc__, NAME)
    arguments.add_argument("--runs", type=int, default=1000, help="number of runs after which the program ends")
    arguments.add_argument("--report", action="store_true", help="only draw and print what is stored")
    arguments.add_argument("--work", type=Path, default=Path("runs/algorithms"), help="folder of the runs")
    options = arguments.parse_args()
    evidence = Evidence(NAME, stale_after=STALE_AFTER, folder=options.folder, fresh=options.fresh)
    work: Path = options.work.resolve()
    left = options.runs
    for imitated_policy, presets, seeds in COMPARISONS:
        parts: dict[str, dict[int, Any]] = {}
        names = {(preset, seed): f"{preset}, seed {seed}" for seed in seeds for preset in presets}
        is_complete = all(map(evidence.has, names.values()))
        if not is_complete and left > 0 and not options.report:
            before = before_reinforcement(work)
            if evidence.part(imitated_policy, lambda before=before: before) != before:  # type: ignore[misc]
                sys.exit(f"{work}: holds another imitated policy than that of the stored runs; name their folder")
        for (preset, seed), name in names.items():
            if not evidence.has(name):
                if options.report or left <= 0:
                    continue
                left -= 1
            parts.setdefault(preset, {})[seed] = evidence.part(name, partial(measure, preset, seed, work))
        if parts:
            show(parts, evidence.part(imitated_policy, partial(before_reinforcement, work)))
        if presets is RANKED and parts:
            draw(parts)


if __name__ == "__main__":
    main()
