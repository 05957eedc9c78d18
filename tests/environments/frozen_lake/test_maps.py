"""Lakes with a fixed map: Gymnasium's maps and custom ones."""

from __future__ import annotations

import json
from typing import Any

import gymnasium
import pytest
from gymnasium.envs.toy_text.frozen_lake import MAPS as GYMNASIUM_MAPS

import envkit
from envkit.environments.board import find_board
from envkit.environments.frozen_lake import MAPS, FrozenLake, LakeOptions
from envkit.errors import OptionError

POND = ["FFF", "FSF", "FGF"]


def test_the_named_maps_and_their_limits_are_gymnasiums() -> None:
    assert {name: list(rows) for name, rows in MAPS.items()} == GYMNASIUM_MAPS
    for env_id, theirs, shortest in (
        ("GymnasiumFrozenLake-v0", "FrozenLake-v1", 6),
        ("GymnasiumFrozenLake8x8-v0", "FrozenLake8x8-v1", 14),
    ):
        limit = gymnasium.spec(theirs).max_episode_steps
        assert limit is not None
        env = envkit.make(env_id)
        _, info = env.reset(seed=0)
        assert info["level"] == {"shortest": shortest}
        assert [env.step("wait")[3] for _ in range(limit)] == [False] * (limit - 1) + [True]


def test_every_episode_on_a_map_has_the_same_start_and_slips_by_its_seed() -> None:
    env = FrozenLake(map="4x4", slip=2 / 3, instructions=False)
    starts = {env.reset(seed=seed)[0] for seed in range(20)} | {env.reset()[0] for _ in range(20)}
    assert starts == {"P___\n_O_O\n___O\nO__G"}
    after = set()
    for seed in range(30):
        env.reset(seed=seed)
        after.add(env.step("<answer>right</answer>")[0].find("P"))
    assert after == {0, 1, 5}


@pytest.mark.parametrize("rows", [["FSF", "HFH", "HGF"], ("FSF", "HFH", "HGF"), json.loads('["FSF", "HFH", "HGF"]')])
def test_a_custom_map_is_played(rows: Any) -> None:
    for env, options in ((FrozenLake(map=rows), None), (FrozenLake(), {"map": rows})):
        text, info = env.reset(seed=1, options=options)
        assert find_board(text) == "_P_\nO_O\nOG_"
        assert info["level"] == {"shortest": 2}
        assert env.step("<answer>down</answer>")[:3] == ("___\nOPO\nOG_", 0.0, False)
        assert env.step("<answer>down</answer>")[:3] == ("___\nO_O\nO√_", 1.0, True)


def test_a_map_sets_size_and_limit_and_accepts_its_own_size() -> None:
    pond = ["FFFFF", "FFFFF", "FFSFF", "FFFFF", "FFFFG"]
    options = LakeOptions(map=pond, size=5)
    assert (options.side, options.move_limit) == (5, 200)
    assert LakeOptions(map=POND).move_limit == 100
    assert LakeOptions(map=POND, max_moves=7).move_limit == 7
    assert LakeOptions(map="8x8", size=8).side == 8


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ([], "square of 2 to 32 rows"),
        (["S"], "square of 2 to 32 rows"),
        (["SF", "FFG"], r"got 2 rows of \[2, 3\]"),
        (["S" + "F" * 32] + ["F" * 33] * 31 + ["F" * 32 + "G"], "got 33 rows"),
        (["SF", "FX"], "got 'X'"),
        (["SS", "FG"], "one S and one G, got 2 and 1"),
        (["SH", "HG"], "no path from S to G"),
        ("5x5", "'5x5' is not a known value"),
        (4, "must be 4x4 or 8x8, or a list of rows"),
        ([["S", "F"], ["F", "G"]], "must be 4x4 or 8x8, or a list of rows"),
    ],
)
def test_an_invalid_map_is_refused_with_the_reason(value: Any, reason: str) -> None:
    with pytest.raises(OptionError, match=f"^map: .*{reason}"):
        FrozenLake(map=value)
    with pytest.raises(OptionError, match=f"^map: .*{reason}"):
        FrozenLake().reset(options={"map": value})


@pytest.mark.parametrize(("option", "value"), [("size", 5), ("split", "eval"), ("num_levels", 3)])
def test_options_of_random_lakes_are_refused_with_a_map(option: str, value: Any) -> None:
    with pytest.raises(OptionError, match=f"^{option}: .* map"):
        FrozenLake(map="4x4", **{option: value})
    with pytest.raises(OptionError, match=f"^{option}: .* map"):
        FrozenLake(map="4x4").reset(options={option: value})
