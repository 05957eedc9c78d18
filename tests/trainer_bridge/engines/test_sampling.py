"""What is sampled from: a distribution worked out by hand, cut and inverted as `SamplingParams` says."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

from envkit import clock
from envkit.trainer_bridge.engines import sampling
from envkit.trainer_bridge.engines.sampling import sample
from envkit.trainer_bridge.engines.transformers import TransformersEngine
from envkit.types import Completion, SamplingParams, stable_hash
from tests.trainer_bridge.models import open_model, slow_logps

DICE = (0.1, 0.4, 0.05, 0.3, 0.15)
"""Chances of the five tokens, whatever the prompt."""
SEED = 3


def roll(count: int, **how: Any) -> list[tuple[int, float]]:
    """Sample `count` tokens of one completion."""
    logits_V = torch.tensor(DICE).log() + 3.0  # what is added to all logits changes nothing
    params = SamplingParams(max_tokens=count, seed=SEED, **how)
    return sample(logits_V.expand(count, -1), [params] * count, range(count))


def shares(count: int = 1500, **how: Any) -> list[float]:
    seen = Counter(token for token, _ in roll(count, **how))
    return [seen[token] / count for token in range(len(DICE))]


def near(*chances: float) -> list[object]:
    """Shares of 1500 throws lie within 0.04 of their chances (three deviations of the likeliest)."""
    return [pytest.approx(chance, abs=0.04) if chance else 0 for chance in chances]


def test_plain_sampling_follows_the_models_chances() -> None:
    assert shares() == near(*DICE)


def test_a_temperature_of_one_half_squares_the_chances() -> None:
    # Squares 0.01, 0.16, 0.0025, 0.09, 0.0225; their sum 0.285.
    assert shares(temperature=0.5) == near(*(chance**2 / 0.285 for chance in DICE))


def test_top_k_keeps_the_likeliest() -> None:
    # 0.4 and 0.3 of 0.7.
    assert shares(top_k=2) == near(0, 4 / 7, 0, 3 / 7, 0)


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [
        (0.01, (0, 1, 0, 0, 0)),  # the likeliest stays, however small the bound
        (0.39, (0, 1, 0, 0, 0)),
        (0.41, (0, 4 / 7, 0, 3 / 7, 0)),
        (0.71, (0, 40 / 85, 0, 30 / 85, 15 / 85)),  # 0.4 + 0.3 do not reach 0.71
        (0.96, DICE),
    ],
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p: float, kept: Sequence[float]) -> None:
    assert shares(top_p=top_p) == near(*kept)


def test_the_narrower_of_top_k_and_top_p_decides() -> None:
    assert shares(300, top_k=1, top_p=0.9) == [0, 1, 0, 0, 0]
    assert shares(300, top_k=4, top_p=0.1) == [0, 1, 0, 0, 0]


def test_temperature_zero_takes_the_likeliest() -> None:
    assert {token for token, _ in roll(50, temperature=0.0)} == {1}


def test_a_seed_is_a_place_in_the_distribution() -> None:
    # Seed and place hash to a number in [0, 1): the token is the one in whose stretch of [0, 1) it falls.
    edges = [0.1, 0.5, 0.55, 0.85, 1.0]
    for place, (token, _) in enumerate(roll(200)):
        number = stable_hash(SEED, place) / 2**64
        assert token == next(one for one, edge in enumerate(edges) if number < edge)


def test_logprobs_are_those_of_the_tempered_distribution_before_top_k_and_top_p() -> None:
    for token, logprob in roll(40, temperature=0.5, top_k=2, top_p=0.8):
        assert logprob == pytest.approx(math.log(DICE[token] ** 2 / 0.285), abs=1e-5)
    for token, logprob in roll(5, temperature=0.0):
        assert logprob == pytest.approx(math.log(DICE[token]), abs=1e-5)


def test_each_row_of_a_batch_is_cut_by_its_own_parameters() -> None:
    ways: list[dict[str, Any]] = [{}, {"top_k": 1}, {"top_p": 0.5}, {"temperature": 0.0}, {"top_k": 3}]
    seen: list[set[int]] = [set() for _ in ways]
    logits_BV = torch.tensor(DICE).log().expand(len(ways), -1)
    for position in range(200):
        params = [SamplingParams(seed=SEED, **way) for way in ways]
        for row, (token, _) in enumerate(sample(logits_BV, params, [position] * len(ways))):
            seen[row].add(token)
    assert seen == [{0, 1, 2, 3, 4}, {1}, {1, 3}, {1}, {1, 3, 4}]


def test_rows_are_sampled_in_parts_as_they_are_at_once() -> None:
    vocabulary = sampling._SAMPLED_NUMBERS // 2  # two rows a part
    logits_BV = torch.randn(5, vocabulary, generator=torch.Generator().manual_seed(1))
    params = [SamplingParams(seed=row, temperature=0.7 * (row % 3), top_p=0.9 if row == 3 else 1.0) for row in range(5)]
    positions = [3, 1, 4, 1, 5]
    apart = [sample(logits_BV[row : row + 1], params[row : row + 1], positions[row : row + 1])[0] for row in range(5)]
    assert sample(logits_BV, params, positions) == apart


def test_the_same_seed_gives_the_same_token_wherever_the_row_stands(tiny_folder: Path) -> None:
    engine = TransformersEngine(open_model(tiny_folder), pad_id=0)
    prompt, how = [1, 5, 6, 7], SamplingParams(max_tokens=8, seed=4, temperature=1.3)

    async def main(name: str, others: int) -> Completion:
        found: list[Completion] = []

        async def own() -> None:
            found.append(await engine.generate(prompt, how, session=name))

        async def other(number: int) -> None:
            ids = [1, *range(4, 6 + number)]
            await engine.generate(ids, SamplingParams(max_tokens=5, seed=number), session=f"m{number}")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(own)
            for number in range(others):
                tasks.start_soon(other, number)
        return found[0]

    alone = clock.run(main, "m", 0, virtual=True)
    first, last = clock.run(main, "a", 6, virtual=True), clock.run(main, "z", 6, virtual=True)
    for other in (first, last):
        assert other.token_ids.tolist() == alone.token_ids.tolist()
        assert other.logprobs.tolist() == pytest.approx(alone.logprobs.tolist(), abs=1e-5)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_logprobs_are_the_models_log_softmax_at_the_temperature(tiny_folder: Path, temperature: float) -> None:
    model = open_model(tiny_folder)
    engine = TransformersEngine(model, pad_id=0)

    async def main() -> Completion:
        return await engine.generate([1, 5, 6], SamplingParams(max_tokens=6, seed=3, temperature=temperature))

    got = clock.run(main, virtual=True)
    tokens = got.token_ids.tolist()
    for place, (token, logprob) in enumerate(zip(tokens, got.logprobs.tolist(), strict=True)):
        logps = slow_logps(model, [1, 5, 6, *tokens[:place]], temperature)
        assert logprob == pytest.approx(logps[token], abs=1e-5)
