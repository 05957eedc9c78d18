"""Credit is by rollout: how episodes are cut into samples, rows and passes changes no advantage and no gradient."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from envkit.config import kinds
from envkit.trainer_bridge.algorithms.algorithm import Algorithm, Chosen
from envkit.trainer_bridge.trainers.batching import without_repeats
from envkit.types import Sample, StopReason, hashes
from tests.trainer_bridge.trainees import ONE_UPDATE, Trainee, algorithm_of, groups
from tests.trainer_bridge.trainers.own_parts import LAST_TURN, ROLLOUT_RATIO, TWO_CRITICS

SAMPLES = [
    replace(
        one,
        member=number,
        stop=StopReason.MAX_TURNS if number % 2 else StopReason.TERMINATED,
        observations=hashes([1, 2, 3]),
        named_rewards={"form": one.rewards * (number - 2), "answer": -one.rewards},
    )
    for number, one in enumerate(groups(1, count=2, members=4))
]
RATES = {key: ONE_UPDATE[key] for key in ("learning_rate", "critic_learning_rate")}


def chosen(family: str, name: str, **keys: Any) -> Chosen:
    return Chosen(part := kinds.find(family, name), part.section(**keys))


BASE = algorithm_of(minibatches=1)
RECOMPUTED = algorithm_of(minibatches=1, old_logprobs="recomputed")
ADVANTAGES = {
    **{name: chosen("advantages", name) for name in kinds.names("advantages")},
    "gae, tokens": chosen("advantages", "gae", unit="token"),
    "two critics": TWO_CRITICS.advantage,
    "last turn": LAST_TURN,
}
LOSSES = {
    **{name: chosen("losses", name) for name in kinds.names("losses")},
    "clipped, turns": chosen("losses", "clipped", ratio="turn"),
    "rollout ratio": ROLLOUT_RATIO,
}
KEYS = {"sequence_mask": {"low": 0.5, "high": 2.0}}
ALGORITHMS: dict[str, Algorithm] = {
    **{name: replace(BASE, advantage=one) for name, one in ADVANTAGES.items()},
    **{name: replace(RECOMPUTED, loss=one) for name, one in LOSSES.items()},
    **{
        f"{name}, {loss}": replace(BASE, aggregation=chosen("aggregations", name), loss=LOSSES[loss])
        for name in kinds.names("aggregations")
        for loss in ("clipped", "rollout ratio")
    },
    **{
        name: replace(RECOMPUTED, correction=chosen("corrections", name, **KEYS.get(name, {})))
        for name in kinds.names("corrections")
    },
    "mis, turns": replace(RECOMPUTED, correction=chosen("corrections", "mis", unit="turn")),
    "all terms": replace(
        RECOMPUTED,
        correction=chosen("corrections", "tis"),
        section=algorithm_of(
            minibatches=1,
            old_logprobs="recomputed",
            entropy_coefficient=0.02,
            kl={"coefficient": 0.1},
            overlong={"max_tokens": 8, "buffer_tokens": 6},
        ).section,
    ),
    "kl in the reward": algorithm_of(minibatches=1, kl={"coefficient": 0.1, "place": "reward"}),
}
"""Each part with the parts of GRPO, and some together."""


def piece(one: Sample, first: int, end: int) -> Sample:
    """The sample of the turns from `first` to before `end`; its prompt is all that came before."""
    own = one.mask & (one.turn_ids >= first) & (one.turn_ids < end)
    length = int(np.flatnonzero(own).max()) + 1
    arrays = {name: getattr(one, name)[:length] for name in ("token_ids", "turn_ids", "versions", "ignored")}
    return replace(one, mask=own[:length], logprobs=np.where(own, one.logprobs, 0)[:length], **arrays)


def cuts(rng: random.Random) -> list[Sample]:
    """The same turns in other samples: cut anywhere, some of them twice or in several samples, in any order."""
    found = []
    for one in SAMPLES:
        turns = len(one.rewards)
        ends = [0, *(place for place in range(1, turns) if rng.random() < 0.5), turns]
        found += [piece(one, first, end) for first, end in pairwise(ends)]
        for _ in range(rng.randint(0, 2)):
            first = rng.randrange(turns)
            found.append(piece(one, first, rng.randint(first + 1, turns)))
    return rng.sample(found, len(found))


def learned(folder: Path, algorithm: Algorithm, samples: Sequence[Sample], **how: Any) -> tuple[dict[Any, float], Any]:
    """The advantage of each turn, and the gradient of each module, in float64."""
    trainee = Trainee(folder, None, algorithm=algorithm, dtype=torch.float64, **RATES, **how)
    rows = trainee.trainer._prepare(without_repeats(samples))
    worth = {
        (one.episode, turn): value
        for one, values in zip(rows.samples, rows.advantages, strict=True)
        for turn, value in zip(one.turn_ids[one.mask].tolist(), values.tolist(), strict=True)
    }
    trainee.update(samples)
    modules = (trainee.model, *trainee.critics)
    return worth, [torch.cat([one.grad.flatten() for one in of.parameters() if one.grad is not None]) for of in modules]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_cuts_repeats_order_rows_and_passes_change_nothing(name: str, tiny_folder: Path) -> None:
    rng = random.Random(name)
    one = ALGORITHMS[name]
    algorithm = replace(one, section=one.section.model_copy(update={"minibatches": rng.choice([1, 2])}))
    expected, gradients = learned(tiny_folder, algorithm, SAMPLES)
    micro_tokens, packing = rng.choice([(1, False), (60, False), (60, True), (10**6, True)])
    worth, found = learned(tiny_folder, algorithm, cuts(rng), micro_tokens=micro_tokens, packing=packing)
    assert worth.keys() == expected.keys()
    assert [worth[turn] for turn in expected] == pytest.approx([*expected.values()], rel=1e-6, abs=1e-7)
    for got, gradient in zip(found, gradients, strict=True):
        assert float(gradient.norm()) > 0
        assert float((got - gradient).norm() / gradient.norm()) < 1e-6
