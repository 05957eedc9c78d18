"""What is sampled from: a distribution worked out by hand, cut and inverted as `SamplingParams` says."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
import torch
from torch import nn

from envkit import clock
from envkit.trainer_bridge.engines.transformers import TransformersEngine
from envkit.types import Completion, SamplingParams, stable_hash
from tests.trainer_bridge.models import open_model, slow_logps

DICE = (0.1, 0.4, 0.05, 0.3, 0.15)
"""Chances of the five tokens, whatever the prompt."""
SEED = 3


class Dice(nn.Module):
    """A model that always gives the chances of `DICE`."""

    device = torch.device("cpu")

    def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
        logits_V = torch.tensor(DICE).log() + 3.0  # what is added to all logits changes nothing
        return SimpleNamespace(logits=logits_V.expand(input_ids.shape[0], 1, -1))


def roll(count: int, **how: Any) -> list[tuple[int, float]]:
    """Sample `count` tokens in one completion."""
    engine = TransformersEngine(Dice(), pad_id=0)  # type: ignore[arg-type]

    async def main() -> Completion:
        return await engine.generate([1], SamplingParams(max_tokens=count, seed=SEED, **how))

    got = clock.run(main, virtual=True)
    return list(zip(got.token_ids, got.logprobs, strict=True))


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
    engine = TransformersEngine(Dice(), pad_id=0)  # type: ignore[arg-type]
    ways: list[dict[str, Any]] = [{}, {"top_k": 1}, {"top_p": 0.5}, {"temperature": 0.0}, {"top_k": 3}]
    seen: dict[int, set[int]] = {}

    async def one(number: int) -> None:
        got = await engine.generate([1], SamplingParams(max_tokens=200, seed=SEED, **ways[number]))
        seen[number] = set(got.token_ids)

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            for number in range(len(ways)):
                tasks.start_soon(one, number)

    clock.run(main, virtual=True)
    assert [seen[number] for number in range(5)] == [{0, 1, 2, 3, 4}, {1}, {1, 3}, {1}, {1, 3, 4}]


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
    assert alone.token_ids == first.token_ids == last.token_ids
    assert first.logprobs == pytest.approx(alone.logprobs, abs=1e-5)
    assert last.logprobs == pytest.approx(alone.logprobs, abs=1e-5)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_logprobs_are_the_models_log_softmax_at_the_temperature(tiny_folder: Path, temperature: float) -> None:
    model = open_model(tiny_folder)
    engine = TransformersEngine(model, pad_id=0)

    async def main() -> Completion:
        return await engine.generate([1, 5, 6], SamplingParams(max_tokens=6, seed=3, temperature=temperature))

    got = clock.run(main, virtual=True)
    for place, (token, logprob) in enumerate(zip(got.token_ids, got.logprobs, strict=True)):
        logps = slow_logps(model, [1, 5, 6, *got.token_ids[:place]], temperature)
        assert logprob == pytest.approx(logps[token], abs=1e-5)
