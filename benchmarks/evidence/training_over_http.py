"""Train the quickstart on an `envkit serve` and in the run's own sandbox, in turns, and compare time and episodes.

    python benchmarks/evidence/training_over_http.py

A warm-up first trains a policy, from which all runs start. In each round, a run of four train steps plays on a server,
and one in its own sandbox; rounds alternate which of the two is first. Takes about ten minutes on a quiet machine.
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from record import ROOT, Evidence, parser

from tests.e2e.fleet.fleet import serving

NAME = "training-over-http"
STALE_AFTER = (
    "envkit/fleet",
    "envkit/http",
    "envkit/wiring/env_server.py",
    "envkit/wiring/sandboxes/env_sandboxes.py",
    "envkit/wiring/training/remote.py",
    "trainer_bridge/engines",
    "trainer_bridge/rollout",
    "examples/quickstart.yaml",
)
TWIN = (
    "tests/e2e/training/test_served_training.py::test_a_run_on_a_server_plays_the_episodes_of_a_run_in_its_own_sandbox"
)
MOST = 1.3
"""Maximum ratio of the times."""
STEPS = 4
EPISODES = 256
"""Episodes per train step of the quickstart."""


def train(folder: Path, *settings: str) -> None:
    """Run the quickstart with changed keys, in one thread."""
    command = [sys.executable, "-m", "envkit", "train", str(ROOT / "examples/quickstart.yaml"), "--output", str(folder)]
    for setting in ("trainer.threads=1", "evaluation.episodes=64", "tracking.tensorboard=false", *settings):
        command += ["--set", setting]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def episodes(folder: Path) -> list[tuple[Any, ...]]:
    """Return token ids, rewards and success of all training episodes of a run."""
    return [
        (
            [(turn["generation"]["prompt_ids"], turn["generation"]["completion_ids"]) for turn in episode["turns"]],
            [turn["reward"] for turn in episode["turns"]],
            episode["metrics"].get("success"),
        )
        for step in range(1, STEPS + 1)
        for episode in rows(folder, f"trajectories/step-{step}.jsonl")
    ]


def compare(number: int, folder: Path) -> dict[str, Any]:
    """Measure one round; return the seconds of all rollouts and whether the episodes are equal."""
    policy = folder / "policy"
    if not policy.exists():
        train(policy, "trainer.steps=0", "sandbox.kind=none")
    model = policy / "checkpoints/step-0/policy"
    common = (
        f"trainer.steps={STEPS}",
        f"engine.model={model}",
        "warmup.kind=none",
        "tracking.trajectories_every=1",
        f"tracking.trajectories={EPISODES}",
    )

    def on_server(run: Path) -> None:
        with TemporaryDirectory(prefix="envkit-evidence-") as state, serving("local", Path(state)) as gateway:
            train(run, *common, f"env.url={gateway.url}")

    contestants = {"own": lambda run: train(run, *common), "served": on_server}
    runs = {name: folder / f"{name}-{number}" for name in contestants}
    for name in sorted(contestants, reverse=bool(number % 2)):
        contestants[name](runs[name])
    played = {name: episodes(run) for name, run in runs.items()}
    return {
        **{f"{name}_rollout_s": [row["rollout_s"] for row in rows(run, "metrics.jsonl")] for name, run in runs.items()},
        "episodes": len(played["own"]),
        "is_equal": played["own"] == played["served"],
    }


def result(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians of the rollouts' seconds, their ratio, and whether all episodes are equal."""
    own, served = (median(s for one in rounds for s in one[f"{name}_rollout_s"]) for name in ("own", "served"))
    return {
        "own_rollout_s": round(own, 3),
        "served_rollout_s": round(served, 3),
        "ratio": round(served / own, 3),
        "most": MOST,
        "is_equal": all(one["is_equal"] for one in rounds),
    }


def main() -> int:
    arguments = parser(__doc__, NAME)
    arguments.add_argument("--rounds", type=int, default=3)
    asked = arguments.parse_args()
    evidence = Evidence(NAME, stale_after=STALE_AFTER, folder=asked.folder, fresh=asked.fresh)
    with TemporaryDirectory(prefix="envkit-evidence-") as folder:
        measured = []
        for number in range(asked.rounds):
            measured.append(evidence.part(f"round {number}", partial(compare, number, Path(folder))))
            print(number, measured[-1], flush=True)
    found = evidence.part(f"medians of {asked.rounds} rounds", partial(result, measured))
    print(found)
    return 0 if found["is_equal"] and found["ratio"] <= MOST else 1


if __name__ == "__main__":
    sys.exit(main())
