"""Random schedules of training, with faults, and what holds for each of them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from envkit.trainer_bridge.scheduler.filters import Filter, SuccessBand, TopVariance, ZeroVariance
from envkit.trainer_bridge.scheduler.pace import LagPolicy, Pace
from tests.trainer_bridge.scheduler.simulated import Simulation, SlowHost


def random_pace(rng: random.Random) -> tuple[Pace, dict[str, Any]]:
    """Return a pace, and the other arguments of its `Simulation`."""
    ahead = rng.randint(0, 3)
    filters: Sequence[Filter] = rng.choice([[], [], [ZeroVariance()], [SuccessBand(0.2, 0.8)], [TopVariance(0.5)]])
    pace = Pace(
        steps=rng.randint(2, 5),
        groups_per_step=rng.randint(1, 5),
        group_size=rng.randint(1, 4),
        group_extra=rng.choice([0, 0, 1, 2]),
        straggler=rng.choice([None, None, 2.0]),
        least=rng.randint(1, 2),
        ahead=ahead,
        max_lag=ahead + rng.randint(0, 2),
        lag_policy=rng.choice([*LagPolicy]),
        filters=filters,
        max_filtered=50.0,
    )
    pace = replace(pace, least=min(pace.least, pace.group_size), group_size=max(pace.group_size, 3 if filters else 1))
    weights = rng.choice([(1.0,), (1.0,), (0.4, 0.3, 0.3), (5.0, 1.0)])
    # A run ends with an error if all episodes of a train step are void.
    retries = 10 if not pace.refills and pace.groups_per_step * pace.group_size < 8 else rng.randint(0, 2)
    how = {"weights": weights, "train_s": rng.choice([0.0, 1.0, 30.0]), "retries": retries}
    return pace, {**how, "step_timeout_s": 100.0, "tokens": 3}


def faulty(rng: random.Random) -> float:
    """Most steps take a while; some hang, and some lose their sandbox."""
    return rng.choice([-1.0, 1000.0]) if rng.random() < 0.05 else rng.lognormvariate(1.0, 1.5)


def random_run(seed: int, folder: Path) -> Simulation:
    """Run a random schedule to its end. The run itself checks that its accounts add up and that every place is free."""
    rng = random.Random(seed)
    pace, how = random_pace(rng)
    host = SlowHost(faulty, seed=seed, turns=4, capacity=rng.randint(1, 30))
    return Simulation(folder, host, pace, **how).run()


def problems(run: Simulation) -> list[str]:
    """Return one line for each promise that a run did not keep."""
    pace, counts, batches = run.scheduler.pace, run.scheduler.ledger.counts(), run.scheduler.batches
    groups = [group for batch in batches for group in batch.groups]
    valid = [sum(not one.is_void for one in group.trajectories) for group in groups]
    numbers = Counter(group.trajectories[0].index for group in groups)
    waits = pace.lag_policy is LagPolicy.WAIT
    holds = {
        "every train step was made": len(run.rows) == pace.steps,
        "no token is too old": max(row.get("lag_max", 0.0) for row in run.rows) <= pace.max_lag,
        "no batch has too many groups": all(len(batch.groups) <= pace.groups_per_step for batch in batches),
        "no group is too large": all(count <= pace.group_size for count in valid),
        "no group is too small": not pace.refills or all(count >= pace.least for count in valid),
        "no group is trained on twice": set(numbers.values()) <= {1},
        "nothing is masked while the trainer waits": not waits or counts["tokens_masked_lag"] == counts["dropped"] == 0,
        "nothing is dropped while the trainer waits": not (waits and pace.ahead and not pace.filters)
        or counts["stale"] == 0,
        "nothing is left": pace.refills or counts["queued"] == counts["finished"] == 0,
    }
    return [what for what, is_so in holds.items() if not is_so]
