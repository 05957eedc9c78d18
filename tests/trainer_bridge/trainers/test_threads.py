"""Torch threads: the number for learning, and its scope."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from envkit import clock, config
from envkit.trainer_bridge.engines.transformers import TransformersEngine
from envkit.trainer_bridge.threads import learning_threads, torch_threads
from envkit.trainer_bridge.warmup.warmup import Imitator, Stage
from envkit.wiring.training.policy import playing_threads
from tests.trainer_bridge.models import open_model, sample
from tests.trainer_bridge.trainees import KINDS, Trainee, draw_samples
from tests.trainer_bridge.watched import params

CORES = os.cpu_count() or 1


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Torch on a machine with two cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_learning_takes_all_threads_and_one_where_the_load_is_above_the_cores() -> None:
    assert learning_threads(0.0) == (2, "")
    assert learning_threads(float(CORES)) == (2, "")
    count, why = learning_threads(CORES + 0.6)
    assert count == 1
    assert why == f"threads: 1 for learning, because the load average {CORES}.6 exceeds the number of cores ({CORES})"


def test_where_torch_has_one_thread_there_is_nothing_to_say() -> None:
    assert learning_threads(CORES + 100.0) == (1, "")


@pytest.mark.parametrize(
    ("threads", "model", "expected"), [(0, None, 1), (3, None, 3), (0, "some/model", 0), (3, "some/model", 3)]
)
def test_a_tiny_policy_plays_with_one_thread_unless_the_file_says_more(
    threads: int, model: str | None, expected: int
) -> None:
    content = {"env": {"id": "FrozenLake-v0"}, "trainer": {"threads": threads}, "engine": {"model": model}}
    assert playing_threads(config.parse(content)) == expected


@pytest.mark.usefixtures("two_threads")
def test_a_number_of_threads_holds_in_its_block_alone_and_0_leaves_it() -> None:
    with torch_threads(1):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2
    with torch_threads(0):
        assert torch.get_num_threads() == 2


def test_the_engine_generates_and_trainers_learn_with_their_own_number_of_threads(
    tiny_folder: Path, tmp_path: Path
) -> None:
    seen: list[int] = []

    def note(module: object, args: object) -> None:
        seen.append(torch.get_num_threads())

    played = open_model(tiny_folder)
    played.register_forward_pre_hook(note)
    engine = TransformersEngine(played, pad_id=0, threads=3)
    trainee = Trainee(tiny_folder, tmp_path, **KINDS["grpo"], threads=2)
    trainee.model.register_forward_pre_hook(note)
    imitator = Imitator(trainee.model, max_grad_norm=1.0, micro_tokens=1000, threads=4)

    async def never(update: int, loss: float) -> bool:
        return False

    async def main() -> None:
        await engine.generate([1, 5, 6], params(n=1))
        await trainee.trainer.accumulate(draw_samples(0, 4, tiny_folder))
        await trainee.trainer.update()
        await imitator.run(Stage(1, 1, 1e-2), lambda update: [sample([1, 5, 6], ([7], ()))], after=never)

    clock.run(main)
    assert list(dict.fromkeys(seen)) == [3, 2, 4]
