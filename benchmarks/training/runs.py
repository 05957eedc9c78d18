"""Training runs for evidence, and their learning curves over training time, without the time for evaluations."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

import envkit
from envkit.runs.episodes import EPISODES, read_episodes
from envkit.types import EpisodeRecord, Options

ROOT = Path(__file__).resolve().parents[2]
MODEL = "smollm2-135m"
DRAWS = 10_000

Figures = dict[str, Any]


def train(example: str, *changes: str) -> Figures:
    """Run ``examples/EXAMPLE.yaml`` with changed keys; return the learning curve and the results of the last policy.

    The curve has one point per evaluation: the train step, the seconds of training until then, and the success on
    held-out tasks, sampled and greedy. Training time includes imitation, rollouts and updates, but not evaluations
    and checkpoints.
    """
    with TemporaryDirectory() as name:
        folder = Path(name) / "run"
        train_in(folder, ROOT / "examples" / f"{example}.yaml", *changes)
        env_id = json.loads((folder / "summary.json").read_text())["env_id"]
        return {**figures(folder), "at the end": evaluate(f"checkpoint:{folder}", env_id)}


def train_in(folder: Path, file: Path, *changes: str, threads: int = 0) -> None:
    """Train with a training file and changed keys, or continue the run in `folder`. 0 threads: those of the file."""
    command = [sys.executable, "-m", "envkit", "train", str(file), "--output", str(folder)]
    chosen = [f"threads={threads}", *changes] if threads else changes
    settings = [word for change in chosen for word in ("--set", change)]
    resume = ["--resume"] if (folder / "config.yaml").exists() else []
    environment = {**os.environ, **({"OMP_NUM_THREADS": str(threads)} if threads else {})}
    subprocess.run([*command, *settings, *resume], check=True, env=environment)


def figures(folder: Path) -> Figures:
    """Return the policy, the times and the learning curve (see `train`) that a run's folder records."""
    summary = json.loads((folder / "summary.json").read_text())
    imitation_s = summary["imitation"]["wall_s"] if summary["imitation"] else 0.0
    seconds = [0.0]
    for step in rows(folder / "metrics.jsonl"):
        seconds.append(seconds[-1] + step["rollout_s"] + step["update_s"])
    curve = [
        {
            "train_step": point["step"],
            "training_s": round(imitation_s + seconds[point["step"]], 1),
            "sampled": round(point["eval_success"], 4),
            "greedy": round(point["eval_greedy"], 4),
        }
        for point in rows(folder / "evaluations.jsonl")
    ]
    return {"policy": summary["policy"], "imitation_s": imitation_s, "wall_s": summary["wall_s"], "curve": curve}


def evaluate(policy: str, env_id: str, *words: str) -> Figures:
    """Return a policy's sampled success on held-out tasks, and the share of valid answers. `words` are options."""
    command = [sys.executable, "-m", "envkit", "eval", env_id, "--policy", policy, "--json", *words]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    metrics = json.loads(done.stdout)["metrics"]
    return {
        "success": metrics["success"],
        "valid_answers": metrics["action_is_valid"],
    }


def played(run: Path, folder: Path, env_id: str, episodes: int, options: Options) -> list[EpisodeRecord]:
    """Return the held-out episodes that the policy of a run plays with sampling, by level; `folder` keeps them."""
    if not (folder / "evaluation.json").exists():
        envkit.evaluate(env_id, f"checkpoint:{run}", episodes=episodes, options=options, output=folder)
    return sorted(read_episodes(folder / EPISODES), key=lambda episode: episode.index)


def marks(found: Iterable[bool]) -> str:
    """Return 1 or 0 for each episode, in one text."""
    return "".join("1" if one else "0" for one in found)


def numbers(marks: str) -> NDArray[np.float64]:
    return np.array([float(one) for one in marks])


def interval(table_SL: NDArray[np.float64], rng: np.random.Generator) -> tuple[float, float]:
    """Return the bounds (95 %) of the mean over seeds and levels, which are both drawn anew `DRAWS` times."""
    seeds, levels = table_SL.shape
    means = [
        table_SL[rng.integers(seeds, size=seeds)][:, rng.integers(levels, size=levels)].mean() for _ in range(DRAWS)
    ]
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def rows(path: Path) -> list[Figures]:
    """Return the objects in a JSON-lines file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def reached(curve: Sequence[Figures], success: float) -> float | None:
    """Return the seconds of training until the first evaluation with at least this sampled success."""
    return next((point["training_s"] for point in curve if point["sampled"] >= success), None)


def success_within(curve: Sequence[Figures], seconds: float) -> float:
    """Return the last sampled success measured within `seconds` of training."""
    return [point["sampled"] for point in curve if point["training_s"] <= seconds][-1]
