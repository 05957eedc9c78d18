"""Compare training with an earlier commit: the same tokens, rewards and metrics, and how fast a language model plays.

    python benchmarks/evidence/training_contract.py --base COMMIT

The earlier commit is checked out beside this one, and both run in this Python environment with one thread.

- ``seed N``: the first six train steps of the quickstart (a tiny policy that envkit made). Compared are token ids,
  actions, rewards, success and turns of the recorded episodes, and all other metrics.
- ``lake``: two train steps of ``llm-lake.yaml`` with a policy from ``--policy`` (SmolLM2-135M after some imitation),
  each commit in turn; tokens per second of the rollouts.
- ``served N``: four train steps of the quickstart on an `envkit serve` and in the run's own sandbox; rounds alternate
  which of the two is first. Compared are tokens, rewards and success, and the seconds of the rollouts.
- ``out of step``: a language model's episodes that arrive at different moments; tokens that the model processed for
  each new token.
- ``samples``: 4,000 trajectories of 10 turns and 1,000 tokens, converted to samples and tensors on one core.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import anyio
import numpy as np
import torch
from record import ROOT, Evidence, parser

from envkit.trainer_bridge.engines.transformers import TransformersEngine
from envkit.trainer_bridge.samples import samples_from
from envkit.trainer_bridge.trainers.batching import lay_out, passes
from envkit.types import (
    Completion,
    FinishReason,
    Observation,
    Outcome,
    Reset,
    SamplingParams,
    Step,
    StopReason,
    Task,
    Trajectory,
    Turn,
    ints,
)
from tests.e2e.fleet.fleet import serving

NAME = "training-contract"
STALE_AFTER = ("trainer_bridge", "envkit/wiring/training", "envkit/types", "envkit/fleet", "envkit/http")
TWIN = (
    "tests/e2e/training/test_served_training.py::test_a_run_on_a_server_plays_the_episodes_of_a_run_in_its_own_sandbox"
)

SEEDS = (7, 3, 11)
QUICKSTART = (
    "trainer.steps=6", "threads=1", "sandbox.kind=none", "evaluation.episodes=32",
    "tracking.trajectories_every=1",
)  # fmt: skip
LAKE = (
    "trainer.steps=2", "threads=1", "trainer.groups_per_step=4", "trainer.learning_rate=1e-9",
    "trainer.precision=float32", "engine.dtype=float32", "sandbox.kind=none", "imitation.kind=none",
    "evaluation.episodes=0",
)  # fmt: skip
ROUNDS = 3
SERVED_STEPS = 4
"""Episodes per train step of the quickstart."""
SERVED_MOST = 1.3
"""Maximum ratio of the times on a server and in a sandbox."""
TRAJECTORIES = 4_000

Figures = dict[str, Any]


def main() -> None:
    """Measure what is missing in the evidence file."""
    how = arguments()
    evidence = Evidence(NAME, stale_after=STALE_AFTER, folder=how.folder, fresh=how.fresh)
    evidence.part("samples", samples)
    if how.policy is not None:
        evidence.part("out of step", lambda: out_of_step(how.policy))
    with TemporaryDirectory(prefix="envkit-evidence-") as folder:
        place = Path(folder)
        if how.base is not None:
            with checked_out(how.base, place / "base") as base:
                for seed in how.seeds:
                    evidence.part(f"seed {seed}", lambda seed=seed: equality(base, place, seed))
                if how.policy is not None:
                    evidence.part("lake", lambda: lake(base, place, how.policy))
        rounds = [
            evidence.part(f"served {number}", lambda number=number: served(number, place))
            for number in range(how.rounds)
        ]
    if rounds:
        evidence.part("served, medians", lambda: served_medians(rounds))


def arguments() -> argparse.Namespace:
    made = parser(__doc__, NAME)
    made.add_argument("--base", help="the commit to compare with")
    made.add_argument("--policy", type=Path, help="folder of a language model that plays the lake of llm-lake.yaml")
    made.add_argument("--seeds", type=int, nargs="*", default=SEEDS, help="seeds to compare with the earlier commit")
    made.add_argument("--rounds", type=int, default=ROUNDS, help="rounds on a server and in a sandbox")
    return made.parse_args()


@contextmanager
def checked_out(commit: str, folder: Path) -> Iterator[Path]:
    """Check out a commit into `folder`, and remove it at the end."""
    git = ["git", "-C", str(ROOT), "worktree"]
    subprocess.run([*git, "add", "--detach", str(folder), commit], check=True, capture_output=True)
    try:
        yield folder
    finally:
        subprocess.run([*git, "remove", "--force", str(folder)], check=True, capture_output=True)


def train(checkout: Path, example: str, output: Path, changes: Sequence[str]) -> list[Figures]:
    """Train with the code in `checkout`, and return the rows of metrics.jsonl."""
    words = [word for change in changes for word in ("--set", change)]
    file = ROOT / "examples" / f"{example}.yaml"
    command = [sys.executable, "-m", "envkit", "train", str(file), "--output", str(output), "--force", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=checkout, env=environment, check=True, capture_output=True)
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def equality(base: Path, place: Path, seed: int) -> Figures:
    """Return the differences between the two commits; see `apart` for the bound."""
    folders = [place / f"{name}-{seed}" for name in ("before", "after")]
    rows = [
        train(checkout, "quickstart", folder, (*QUICKSTART, f"seed={seed}"))
        for checkout, folder in zip((base, ROOT), folders, strict=True)
    ]
    before, after = ([essence(episode) for episode in episodes(folder)] for folder in folders)
    return {
        "episodes": len(before),
        "different_episodes": sum(one != other for one, other in zip(before, after, strict=True)),
        "different_metrics": sorted({name for old, new in zip(*rows, strict=True) for name in apart(old, new)}),
    }


def episodes(folder: Path) -> Iterator[Figures]:
    for file in sorted((folder / "trajectories").iterdir()):
        yield from (json.loads(line) for line in file.read_text().splitlines())


def essence(episode: Figures) -> Any:
    """Return what must be equal in an episode."""
    turns = [
        (turn["action"], turn["reward"], turn["generation"]["prompt_ids"], turn["generation"]["completion_ids"])
        for turn in episode["turns"]
    ]
    return episode["seed"], episode["member"], episode["outcome"]["reward"], episode["outcome"]["success"], turns


def apart(old: Figures, new: Figures) -> list[str]:
    """Return the metrics that differ by more than 1e-4 of their value and 1e-6; durations and memory are left out."""
    numbers = {
        name: value for name, value in old.items() if isinstance(value, float) and not name.endswith(("_s", "_mib"))
    }
    return [name for name, value in numbers.items() if not abs(value - new[name]) <= max(1e-4 * abs(value), 1e-6)]


def lake(base: Path, place: Path, policy: Path) -> Figures:
    """Return the tokens per second of rollouts of both commits, in turns."""
    speeds: dict[str, list[float]] = {"before": [], "after": []}
    for _ in range(ROUNDS):
        for name, checkout in (("before", base), ("after", ROOT)):
            rows = train(checkout, "llm-lake", place / f"lake-{name}", (*LAKE, f"engine.model={policy.resolve()}"))
            speeds[name].append(sum(row["tokens"] for row in rows) / sum(row["rollout_s"] for row in rows))
    ratios = [after / before for before, after in zip(*speeds.values(), strict=True)]
    return {"tokens_per_s": speeds, "median_ratio": round(statistics.median(ratios), 3)}


def out_of_step(policy: Path) -> Figures:
    """Play 8 sessions of 5 turns whose environments answer after different times; count the processed tokens."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32).eval()
    engine = TransformersEngine(model, pad_id=0, threads=1)
    new_tokens = 0

    async def session(number: int) -> None:
        nonlocal new_tokens
        draw = np.random.default_rng(number)
        ids: list[int] = []
        for turn in range(5):
            observed = draw.integers(10, 40_000, 24).tolist()
            ids += observed
            params = SamplingParams(max_tokens=8, seed=100 * number + turn)
            completion = await engine.generate(ids, params, session=f"{number:02d}")
            ids += completion.token_ids.tolist()
            new_tokens += len(observed) + len(completion.token_ids)
            await anyio.sleep(0.01 * draw.integers(1, 20))

    async def everyone() -> int:
        async with anyio.create_task_group() as tasks:
            for number in range(8):
                tasks.start_soon(session, number)
        return (await engine.health()).fed_tokens

    fed = anyio.run(everyone)
    return {"new_tokens": new_tokens, "fed_tokens": fed, "ratio": round(fed / new_tokens, 3)}


def samples() -> Figures:
    """Convert trajectories to samples and tensors; return processor seconds for 100,000, and bytes per token."""
    torch.set_num_threads(1)
    draw = np.random.default_rng(0)
    trajectories = [trajectory(draw, number) for number in range(TRAJECTORIES)]
    before = resource.getrusage(resource.RUSAGE_SELF)
    made = [sample for one in trajectories for sample in samples_from(one)]
    for rows in passes(made, 16_384):
        lay_out([[made[row]] for row in rows], torch.device("cpu"))
    after = resource.getrusage(resource.RUSAGE_SELF)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    one = made[0]
    arrays = (one.token_ids, one.mask, one.logprobs, one.turn_ids, one.versions, one.rewards, one.observations)
    grown_kib = after.ru_maxrss - before.ru_maxrss
    return {
        "processor_seconds_for_100000": round(seconds * 100_000 / TRAJECTORIES, 1),
        "bytes_per_token": round(sum(array.nbytes for array in arrays) / len(one.token_ids), 2),
        "grown_bytes_per_token": round(grown_kib * 1024 / sum(len(sample.token_ids) for sample in made), 1),
    }


def trajectory(draw: np.random.Generator, number: int) -> Trajectory:
    step = Step(Observation("observed"), 0.1, terminated=False, truncated=False, info={})
    turns = []
    for _ in range(10):
        completion = Completion(
            ints(draw.integers(0, 49_152, 20)), -draw.random(20), FinishReason.STOP, versions=((3, 20),)
        )
        turns.append(Turn(ints(draw.integers(0, 49_152, 80)), completion, "left", step))
    task = Task("Lake-v0", number // 8)
    outcome, start = Outcome.score(StopReason.TERMINATED, 1.0, {}), Reset(step.observation, {})
    return Trajectory(task, number % 8, tuple(turns), outcome, start=start, key=str(number))


def train_here(folder: Path, *settings: str) -> None:
    """Run the quickstart of this commit with changed keys, in one thread."""
    command = [sys.executable, "-m", "envkit", "train", str(ROOT / "examples/quickstart.yaml"), "--output", str(folder)]
    for setting in ("threads=1", "evaluation.episodes=64", "tracking.to=[]", *settings):
        command += ["--set", setting]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def played_in(folder: Path) -> list[tuple[Any, ...]]:
    """Return token ids, rewards and success of the recorded training episodes of a run."""
    return [
        (
            [(turn["generation"]["prompt_ids"], turn["generation"]["completion_ids"]) for turn in episode["turns"]],
            [turn["reward"] for turn in episode["turns"]],
            episode["outcome"]["success"],
        )
        for step in range(1, SERVED_STEPS + 1)
        for episode in rows(folder, f"trajectories/step-{step}.jsonl")
    ]


def served(number: int, folder: Path) -> dict[str, Any]:
    """Measure one round; return the seconds of all rollouts and whether the episodes are equal."""
    policy = folder / "policy"
    if not policy.exists():
        train_here(policy, "trainer.steps=0", "sandbox.kind=none")
    model = policy / "checkpoints/step-0/policy"
    common = (
        f"trainer.steps={SERVED_STEPS}",
        f"engine.model={model}",
        "imitation.kind=none",
        "tracking.trajectories_every=1",
    )

    def on_server(run: Path) -> None:
        with TemporaryDirectory(prefix="envkit-evidence-") as state, serving("local", Path(state)) as gateway:
            train_here(run, *common, f"env.url={gateway.url}")

    contestants = {"own": lambda run: train_here(run, *common), "served": on_server}
    runs = {name: folder / f"{name}-{number}" for name in contestants}
    for name in sorted(contestants, reverse=bool(number % 2)):
        contestants[name](runs[name])
    played = {name: played_in(run) for name, run in runs.items()}
    return {
        **{f"{name}_rollout_s": [row["rollout_s"] for row in rows(run, "metrics.jsonl")] for name, run in runs.items()},
        "episodes": len(played["own"]),
        "is_equal": played["own"] == played["served"],
    }


def served_medians(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians of the rollouts' seconds, their ratio, and whether all episodes are equal."""
    seconds = {name: [s for one in rounds for s in one[f"{name}_rollout_s"]] for name in ("own", "served")}
    own, remote = map(statistics.median, seconds.values())
    return {
        "own_rollout_s": round(own, 3),
        "served_rollout_s": round(remote, 3),
        "ratio": round(remote / own, 3),
        "most": SERVED_MOST,
        "is_equal": all(one["is_equal"] for one in rounds),
    }


if __name__ == "__main__":
    main()
