"""Asynchronous training on the real clock: its speed, and what the policy learns, compared with lag 0.

    python benchmarks/evidence/training/asynchronous.py [--parts clock,hang,learning,language-model]

There are four measurements:

- clock: a tiny policy on `SlowLake-v0`, a frozen lake of which each step takes 20 ms in the median (log-normal, sigma
  1) without using the processor. The places suffice for all episodes in progress. Engine and trainer have one thread
  each. With `ahead` 0, the engine transformers plays in lockstep, so there is also a run at lag 0 without it: it looks
  for stragglers, but none takes long enough. The rates of engine and trainer are those of the same run, in which both
  run at the same time. The first and the last train steps do not count;
- hang: the same, but one step in 2,000 hangs until its deadline of 5 s. The episode is then void and played again;
- learning: the lake of ``examples/quickstart.yaml`` with five seeds. The final policies play the same 2,000 held-out
  levels with sampling. The interval of a difference to lag 0 holds with 95 % over seeds and levels: both are drawn
  anew, 10,000 times;
- language-model: SmolLM2-135M on the sums of ``examples/llm-arithmetic.yaml``, with a vLLM server on the same cores and
  two seeds. The final policies answer the 400 held-out sums.

The exit status is 1 if a claim is wrong. Takes about two hours on two cores. All but `learning` need an idle machine.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import count, product
from pathlib import Path
from random import Random
from shutil import rmtree
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, NamedTuple

import anyio
import numpy as np

sys.path.append(str(Path(__file__).parents[1]))  # the folder of `record`
from record import ROOT, Evidence, parser

from benchmarks.training.runs import Figures, interval, marks, numbers, played, rows, train_in
from envkit import clock, config, registry
from envkit.env import AsyncEnv, GymEpisode
from envkit.environments.frozen_lake import FrozenLake
from envkit.types import JSON, Options, Reset, Step, StopReason, Task, stable_hash
from envkit.wiring.api import train
from envkit.wiring.environments import find

NAME = "asynchronous"
STALE_AFTER = (
    "trainer_bridge/loop.py",
    "trainer_bridge/rollout",
    "trainer_bridge/scheduler",
)
TWIN = "tests/contract/engines/test_training.py::test_asynchronous_train_steps_on_a_server_have_no_finding"
PARTS = ("clock", "hang", "learning", "language-model")
QUICKSTART, SUMS = ROOT / "examples" / "quickstart.yaml", ROOT / "examples" / "llm-arithmetic.yaml"


class Setting(NamedTuple):
    """How far episodes run ahead. Without `lockstep`, a run looks for stragglers, but none takes long enough."""

    ahead: int
    max_lag: int
    lag_policy: str = "wait"
    lockstep: bool = True

    @property
    def changes(self) -> tuple[str, ...]:
        found = tuple(f"rollout.{name}={getattr(self, name)}" for name in ("ahead", "max_lag", "lag_policy"))
        return found if self.lockstep else (*found, "rollout.straggler=1000000")

    def __str__(self) -> str:
        name = f"{self.ahead}, {self.max_lag}, {self.lag_policy}"
        return name if self.lockstep else f"{name}, no lockstep"


LAG_0, LAG_1, FAST = Setting(0, 0), Setting(1, 4), Setting(2, 4, "resume")
APART = LAG_0._replace(lockstep=False)

MEDIAN_S, SIGMA, HANG_SHARE = 0.02, 1.0, 1 / 2000
OF_THE_BOUND = 0.75
GROUPS, MEMBERS, STEPS, FIRST, LAST = 16, 8, 80, 10, 5
"""Sizes of the runs on the real clock: `FIRST` train steps at the start and `LAST` at the end do not count."""
PLACES = 2 * GROUPS * MEMBERS
CLOCK = (
    *("env.id=SlowLake-v0", f"env.num_envs={PLACES}", "sandbox.kind=none", "threads=1", "tracking.to=[]"),
    *("imitation.kind=none", "rollout.step_timeout_s=5", "tracking.trajectories_every=0", "evaluation.episodes=0"),
    *(f"trainer.steps={STEPS}", f"trainer.groups_per_step={GROUPS}", f"rollout.group_size={MEMBERS}"),
    *(f"trainer.checkpoint_every={STEPS}",),
)

SEEDS, LEVELS, LAKE, MAX_LOSS = (7, 11, 19, 23, 31), 2000, {"size": 4, "slip": 0.0, "max_moves": 10}, 0.06
IMITATION = ("trainer.steps=0", "evaluation.episodes=0", "tracking.to=[]")
"""Changes of the quickstart for the policy with which the runs on the lake begin."""
LEARNING = (
    *("imitation.kind=none", "sandbox.kind=none", "tracking.to=[]", "evaluation.episodes=0"),
    "trainer.checkpoint_every=60",
)
"""Changes of the quickstart in the runs that learn."""
VLLM = (
    *("engine.kind=vllm", "engine.dtype=float32", "trainer.precision=float32", "tracking.to=[]"),
    *("trainer.steps=40", "trainer.groups_per_step=8", "trainer.checkpoint_every=40", "evaluation.episodes=0"),
)


class SlowLake(AsyncEnv):
    """A frozen lake whose steps take a random time; the n-th episode of a task always has the same latencies.

    Args:
        median_s: Median seconds of a step; 0: no latency. Like all options, it can also be set by a reset.
        hang_share: Chance that a step never returns.
        options: Options of the lake.
    """

    metrics = FrozenLake.metadata["metrics"]
    episodes: ClassVar[dict[int, count[int]]] = {}
    """Counts the episodes of each task."""

    def __init__(self, median_s: float = 0.0, hang_share: float = 0.0, **options: JSON) -> None:
        self._median_s, self._hang_share = median_s, hang_share
        self._lake = FrozenLake(**options)

    async def reset(self, *, seed: int, options: Options) -> Reset:
        chosen: dict[str, Any] = {"median_s": self._median_s, "hang_share": self._hang_share, **options}
        self._median_s, self._hang_share = chosen.pop("median_s"), chosen.pop("hang_share")
        self._rng = Random(stable_hash(seed, next(self.episodes.setdefault(seed, count()))))
        self._episode = GymEpisode(self._lake, Task("FrozenLake-v0", seed, chosen))
        return await self._episode.reset()

    async def step(self, action: str) -> Step:
        if self._rng.random() < self._hang_share:
            await anyio.sleep_forever()
        if self._median_s:
            await anyio.sleep(self._rng.lognormvariate(math.log(self._median_s), SIGMA))
        return await self._episode.step(action)

    async def close(self) -> None:
        self._lake.close()


def imitated(folder: Path) -> str:
    """Return the folder of a policy that has imitated the lake's expert, from a run in `folder`; make it if missing."""
    if not (folder / "summary.json").exists():
        train_in(folder, QUICKSTART, *IMITATION, threads=1)
    return str(folder / "checkpoints" / "step-0" / "policy")


def real_clock(policy: str, setting: Setting, *changes: str) -> Figures:
    """Train on `SlowLake-v0`, and return means of the train steps in the middle of the run."""
    SlowLake.episodes.clear()
    ended_s: list[float] = []
    run = config.load(QUICKSTART, [*CLOCK, f"engine.model={policy}", *setting.changes, *changes])
    with TemporaryDirectory() as name:
        train(run, output=Path(name) / "run", on_step=lambda _, __: ended_s.append(clock.stopwatch()))
        steps = rows(Path(name) / "run" / "metrics.jsonl")[FIRST : STEPS - LAST]
    seconds = ended_s[STEPS - LAST - 1] - ended_s[FIRST - 1]

    def mean(*names: str) -> float:
        return fmean(sum(row[name] for name in names) for row in steps)

    tokens = mean("tokens_trained")
    return {
        "step_s": round(seconds / len(steps), 4),
        "trained_tokens_per_s": round(tokens * len(steps) / seconds, 1),
        "trained_tokens": round(tokens, 1),
        "engine_tokens_per_s": round(tokens / mean("engine_busy_s"), 1),
        "trainer_busy_s": round(mean("trainer_busy_s"), 4),
        "occupied_places_s": round(mean("waiting_environment_s", "waiting_engine_s", "waiting_gate_s"), 2),
        "group_mean_s": round(mean("group_mean_s"), 4),
        "group_max_s": round(mean("group_max_s"), 4),
        "void_episodes": round(mean("episodes_voided"), 2),
        "lag_mean": round(mean("lag_mean"), 3),
        "lag_max": max(row["lag_max"] for row in steps),
        "success": round(mean("success"), 3),
    }


def bounds(setting: Setting, run: Figures) -> dict[str, float]:
    """Return the seconds that a train step takes at least: by trainer, engine, places, admission and cohort."""
    busy_s = run["trainer_busy_s"]
    found = {
        "trainer": busy_s,
        "engine": run["trained_tokens"] / run["engine_tokens_per_s"],
        "places": run["occupied_places_s"] / PLACES,
        "admission": (run["group_mean_s"] + busy_s) / (setting.ahead + 1),
        "cohort": (run["group_max_s"] + busy_s) / (setting.max_lag + 1),
    }
    return {name: round(seconds, 4) for name, seconds in found.items()}


def speed(part: str, evidence: Evidence, work: Path, least: float, *changes: str) -> bool:
    """Compare the settings on the real clock; return whether asynchronous training is `least` times as fast."""

    def measured(name: str, setting: Setting, *changes: str) -> Figures:
        found: Figures = evidence.part(name, lambda: real_clock(imitated(work / "imitated"), setting, *changes))
        return found

    slow = (f"env.options.median_s={MEDIAN_S}", *changes)
    found = {one: measured(f"{part}, {one}", one, *slow) for one in (LAG_0, APART, LAG_1)}
    print(
        f"\n| {part} | s | trained tokens/s | mean lag | trainer | engine | places | admission | cohort | bound / s |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    bounds_s = evidence.part(
        f"{part}, bounds", lambda: {str(setting): bounds(setting, run) for setting, run in found.items()}
    )
    for setting, run in found.items():
        least_s = bounds_s[str(setting)]
        share = max(least_s.values()) / run["step_s"]
        gain = run["trained_tokens_per_s"] / found[LAG_0]["trained_tokens_per_s"]
        print(
            f"| {setting} | {run['step_s']:.2f} | {run['trained_tokens_per_s']:.0f} ({gain:.1f}x) "
            f"| {run['lag_mean']:.2f} | {' | '.join(f'{one:.2f}' for one in least_s.values())} "
            f"| {share:.2f} |"
        )
    return gain >= least and share >= OF_THE_BOUND  # of the last one, which is asynchronous


def learn(file: Path, folder: Path, env_id: str, levels: int, options: Options, *changes: str) -> Figures:
    """Train, and return the success of each train step, and which held-out levels the final policy solves and ends."""
    train_in(folder, file, *changes, threads=1)
    steps, last = rows(folder / "metrics.jsonl"), slice(-5, None)
    evaluated = folder.with_name(f"{folder.name}-eval")
    found = played(folder, evaluated, env_id, levels, options)
    figures = {
        "wall_s": json.loads((folder / "summary.json").read_text())["wall_s"],
        "success_by_step": [round(row["success"], 3) for row in steps],
        "lag_mean": round(fmean(row.get("lag_mean", 0.0) for row in steps), 3),
        "masked_share": round(
            sum(row["tokens_masked_lag"] for row in steps)
            / sum(row["tokens_masked_lag"] + row["tokens_trained"] for row in steps),
            4,
        ),
        "cut_completions_at_the_end": round(fmean(row["cut_completions"] for row in steps[last]), 3),
        "ended": marks(one.outcome.stop is StopReason.TERMINATED for one in found),
        "solved": marks(one.outcome.success is True for one in found),
    }
    for one in (folder, evaluated):  # checkpoints of a language model are large
        rmtree(one)
    return figures


def compare(part: str, runs: Mapping[Setting, Sequence[Figures]]) -> dict[str, Any]:
    """Return the success with each setting, and its difference to lag 0 over the same seeds and levels."""
    rng, found = np.random.default_rng(0), {}
    table = {setting: np.stack([numbers(one["solved"]) for one in figures]) for setting, figures in runs.items()}
    print(f"\n| {part} | success | difference to lag 0 | 95 % interval | ended by themselves | mean lag |")
    print("|---|---|---|---|---|---|")
    for setting, figures in runs.items():
        difference = table[setting] - table[LAG_0]
        low, high = interval(difference, rng)
        found[str(setting)] = {
            "seeds": len(figures),
            "success": round(float(table[setting].mean()), 4),
            "difference": [round(one, 4) for one in (float(difference.mean()), low, high)],
            "ended": round(float(np.stack([numbers(one["ended"]) for one in figures]).mean()), 4),
        }
        print(
            f"| {setting} | {found[str(setting)]['success']:.1%} | {difference.mean() * 100:+.1f} points "
            f"| {low * 100:+.1f} to {high * 100:+.1f} | {found[str(setting)]['ended']:.1%} "
            f"| {fmean(one['lag_mean'] for one in figures):.2f} |"
        )
    return found


def learning(evidence: Evidence, work: Path) -> bool:
    """Compare what the lake's policies learn; return whether no setting is more than 6 points worse than lag 0."""
    runs: dict[Setting, list[Figures]] = {}
    for seed, setting in product(SEEDS, (LAG_0, LAG_1, FAST)):
        name = f"learning, {setting}, seed {seed}"

        def measure(setting: Setting = setting, seed: int = seed, name: str = name) -> Figures:
            changes = (
                *LEARNING,
                f"engine.model={imitated(work / 'imitated')}",
                f"seed={seed}",
                *setting.changes,
            )
            return learn(QUICKSTART, work / name, "FrozenLake-v0", LEVELS, LAKE, *changes)

        runs.setdefault(setting, []).append(evidence.part(name, measure))
    found = compare("learning", runs)
    return all(one["difference"][1] > -MAX_LOSS for one in found.values())


def language_model(evidence: Evidence, work: Path) -> bool:
    """Compare what SmolLM2 learns; return whether it is not worse than at lag 0 (95 %)."""
    runs: dict[Setting, list[Figures]] = {}
    for seed, setting in product(SEEDS[:2], (LAG_0, LAG_1)):
        name = f"language model, {setting}, seed {seed}"

        def measure(setting: Setting = setting, seed: int = seed, name: str = name) -> Figures:
            return learn(SUMS, work / name, "Arithmetic-v0", 400, {}, *VLLM, f"seed={seed}", *setting.changes)

        runs.setdefault(setting, []).append(evidence.part(name, measure))
    found = compare("language model", runs)
    return all(one["difference"][2] >= 0 for one in found.values())


def main() -> int:
    arguments = parser(__doc__, NAME)
    arguments.add_argument("--parts", default=",".join(PARTS), help="parts to measure, separated by commas")
    arguments.add_argument("--work", type=Path, default=Path("runs/asynchronous"), help="folder of the runs")
    asked = arguments.parse_args()
    evidence = Evidence(NAME, stale_after=STALE_AFTER, folder=asked.folder, fresh=asked.fresh)
    work: Path = asked.work.resolve()
    lake = find("FrozenLake-v0")
    registry.register("SlowLake-v0", SlowLake, splits=lake.splits, compact_options=lake.compact_options)
    measure = {
        "clock": partial(speed, "clock", evidence, work, 1.8),
        "hang": partial(speed, "hang", evidence, work, 3.0, f"env.options.hang_share={HANG_SHARE}"),
        "learning": partial(learning, evidence, work),
        "language-model": partial(language_model, evidence, work),
    }
    held = {part: measure[part]() for part in asked.parts.split(",")}
    print("\nclaims hold:", held)
    return 0 if all(held.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
