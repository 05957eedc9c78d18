"""Splits: the content of a level determines its split."""

from __future__ import annotations

import pytest

from envkit.environments.board import find_board
from envkit.environments.frozen_lake import FrozenLake
from envkit.environments.sokoban import Sokoban
from envkit.environments.split import SPLITS, split_of

ENV_CLASSES = pytest.mark.parametrize("env_class", [FrozenLake, Sokoban])


@ENV_CLASSES
def test_splits_share_no_level_over_many_seeds(env_class: type[FrozenLake | Sokoban]) -> None:
    levels = {}
    for split in SPLITS:
        env = env_class(split=split, instructions=False)
        levels[split] = {env.reset(seed=seed)[0] for seed in range(400)}
        assert {split_of(level) for level in levels[split]} == {split}
    assert not levels["train"] & levels["eval"]
    assert not levels["train"] & levels["validation"]
    assert not levels["validation"] & levels["eval"]


@ENV_CLASSES
def test_a_level_is_hashed_with_its_start_but_without_the_rules(env_class: type[FrozenLake | Sokoban]) -> None:
    text, _ = env_class(split="eval").reset(seed=4)
    assert text != find_board(text)
    assert split_of(find_board(text)) == "eval"


def test_the_split_of_a_level_never_changes() -> None:
    # Pinned: a level that moves from train to eval makes old results worthless.
    splits = [split_of(f"P{'_' * ice}G") for ice in range(12)]
    assert splits == ["train"] * 6 + ["eval", "validation", "train", "validation", "train", "eval"]
