"""Training runs on virtual time: how long a train step takes with each bound of the policy lag, and what it costs.

    python benchmarks/evidence/training/lag.py [--schedules N]

The loop, the scheduler and the accounting are those of `envkit train`. The host, the engine and the trainer are
scripted: a step of the environment takes as long as a random number says, an update 30 s, and the engine no time, so an
episode samples all its tokens before it waits. There are three measurements:

- batches of 32 groups of 8 episodes of one turn with a heavy-tailed latency, on 256 places, over five seeds. 14 batches
  count, after ten that do not: until then, the longest episodes of the start are in progress. No run is near its end,
  so nothing is drained;
- one batch of 512 episodes with a normal latency per turn, in lockstep and without, as in ROLL Flash (2510.11345 on
  arXiv), which reports 892 s and 362 s. The number of turns is our choice: 22 fits the 892 s;
- random schedules with hanging steps, lost sandboxes, filters, mixtures and few places. The exit status is 1 if one of
  them breaks a promise.

Takes about five minutes of one core.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # the folder of `record`
from record import Evidence, parser

from envkit.trainer_bridge.scheduler.pace import LagPolicy, Pace
from envkit.trainer_bridge.scheduler.staleness import num_stale_tokens
from tests.trainer_bridge.scheduler.schedules import problems, random_run
from tests.trainer_bridge.scheduler.simulated import Simulation, SlowHost, heavy_tailed, seconds_of

NAME = "lag"
STALE_AFTER = (
    "trainer_bridge/scheduler",
    "trainer_bridge/rollout",
    "trainer_bridge/loop.py",
    "trainer_bridge/step_metrics.py",
    "tests/trainer_bridge/scheduler/simulated.py",
    "tests/trainer_bridge/scheduler/schedules.py",
)
TWIN = "tests/trainer_bridge/scheduler/test_continuous.py::test_a_train_step_takes_as_long_as_its_lag_allows"
HEAVY = Pace(steps=1000, groups_per_step=32, group_size=8)
PACES = {
    LagPolicy.WAIT: ((0, 0), (1, 1), (1, 2), (1, 4), (2, 4), (4, 8)),
    LagPolicy.RESUME: ((1, 1), (1, 2), (2, 4), (4, 8)),
    LagPolicy.DROP: ((1, 1), (1, 4)),
}
SEEDS, FIRST, COUNTED = range(5), 10, 14
LONG_S = 60.0
"""Length of an episode from which it counts as a long one."""


def heavy(pace: Pace) -> dict[str, Any]:
    """Return the figures of a pace with the heavy-tailed latency."""
    begun: list[float] = []

    def noted(rng: Random) -> float:
        begun.append(heavy_tailed(rng))
        return begun[-1]

    found, trained = [], list[float]()
    for seed in SEEDS:
        with TemporaryDirectory() as folder:
            run = Simulation(Path(folder), SlowHost(noted, seed=seed), pace, steps=FIRST + COUNTED).run()
        found.append(steady(run))
        trained += [
            seconds_of(one)
            for batch in run.scheduler.batches[FIRST:]
            for one in batch.trajectories
            if not num_stale_tokens(one, batch.version, pace.max_lag)
        ]
    return {
        **{name: round(fmean(one[name] for one in found), 3) for name in found[0]},
        "step_s_by_seed": [round(one["step_s"], 1) for one in found],
        "mean_length_s": {name: round(fmean(all_s), 1) for name, all_s in (("begun", begun), ("trained", trained))},
        f"share_above_{LONG_S:g}_s": {
            name: round(fmean(one > LONG_S for one in all_s), 3)
            for name, all_s in (("begun", begun), ("trained", trained))
        },
    }


def steady(run: Simulation) -> dict[str, float]:
    """Return the figures of the train steps that count."""
    rows, times = run.rows[FIRST:], run.scheduler.published_s
    seconds = times[-1] - times[FIRST - 1]
    tokens = {
        name: sum(row[f"tokens_{name}"] for row in rows) for name in ("trained", "masked_lag", "stale", "aborted")
    }
    return {
        "step_s": seconds / COUNTED,
        "trained_tokens_per_s": tokens["trained"] / seconds,
        "masked_share": tokens["masked_lag"] / (tokens["masked_lag"] + tokens["trained"]),
        "discarded_share": (tokens["stale"] + tokens["aborted"]) / sum(tokens.values()),
        "lag_mean": fmean(row["lag_mean"] for row in rows),
        "lag_max": max(row["lag_max"] for row in rows),
    }


def normal(rng: Random) -> float:
    """Mean 10 s, deviation 10 s, at least 0 s."""
    return max(0.0, rng.normalvariate(10.0, 10.0))


def rollout(*, in_lockstep: bool) -> dict[str, Any]:
    """Return the seconds of one batch of 512 episodes of 22 turns."""
    pace, found = Pace(steps=1, groups_per_step=64, group_size=8), []
    for seed in SEEDS:
        host = SlowHost(normal, seed=seed, turns=22, least_turns=22, capacity=512)
        with TemporaryDirectory() as folder:
            run = Simulation(Path(folder), host, pace, train_s=0.0, tokens=1, repeats=in_lockstep).run()
        found.append(run.seconds)
    return {"rollout_s": round(fmean(found), 1), "rollout_s_by_seed": [round(one, 1) for one in found]}


def schedules(first: int, last: int) -> dict[str, Any]:
    """Run the random schedules of some seeds, and return which promises were broken."""
    trained, broken = 0, {}
    for seed in range(first, last):
        with TemporaryDirectory() as folder:
            run = random_run(seed, Path(folder))
        trained += run.scheduler.ledger.counts()["trained"]
        if found := problems(run):
            broken[seed] = found
    return {"schedules": last - first, "episodes_trained": trained, "problems": broken}


def table(parts: Mapping[str, Mapping[str, Any]]) -> None:
    """Print the figures of the heavy-tailed latency in Markdown; ratios compare trained tokens per second."""
    print("| pace | s | trained tokens/s | masked | discarded | mean lag | mean length: begun | trained |")
    print("|---|---|---|---|---|---|---|---|")
    base = next(iter(parts.values()))["trained_tokens_per_s"]
    for name, one in parts.items():
        rate, length = one["trained_tokens_per_s"], one["mean_length_s"]
        print(
            f"| {name} | {one['step_s']:.0f} | {rate:.0f} ({rate / base:.1f}x) | {one['masked_share']:.0%} "
            f"| {one['discarded_share']:.0%} | {one['lag_mean']:.2f} | {length['begun']} | {length['trained']} |"
        )


def main() -> int:
    arguments = parser(__doc__, NAME)
    arguments.add_argument("--schedules", type=int, default=1000, help="number of random schedules")
    asked = arguments.parse_args()
    evidence = Evidence(NAME, stale_after=STALE_AFTER, folder=asked.folder, fresh=asked.fresh)
    paces = {
        f"{policy}, ahead {ahead}, max_lag {max_lag}": replace(HEAVY, ahead=ahead, max_lag=max_lag, lag_policy=policy)
        for policy, bounds in PACES.items()
        for ahead, max_lag in bounds
    }
    paces["ahead 0, 2 extra members"] = replace(HEAVY, group_extra=2)
    paces["ahead 0, straggler 4"] = replace(HEAVY, straggler=4.0)
    table({name: evidence.part(name, partial(heavy, pace)) for name, pace in paces.items()})
    for name, in_lockstep in (("lockstep", True), ("no lockstep", False)):
        print(name, evidence.part(name, partial(rollout, in_lockstep=in_lockstep)))
    parts = [
        evidence.part(f"schedules {first} to {first + 99}", partial(schedules, first, first + 100))
        for first in range(0, asked.schedules, 100)
    ]
    broken = [one["problems"] for one in parts if one["problems"]]
    print(f"{sum(one['schedules'] for one in parts)} random schedules; broken promises: {broken or 'none'}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
