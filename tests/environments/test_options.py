"""Options of the worlds: what is refused, and what is said."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from envkit.environments.frozen_lake import FrozenLake, LakeOptions, draw_lake
from envkit.environments.options import override
from envkit.environments.sokoban import Sokoban, SokobanOptions
from envkit.errors import OptionError

WORLDS = pytest.mark.parametrize("world", [FrozenLake, Sokoban])


@WORLDS
def test_an_unknown_option_is_answered_with_the_nearest_one(world: type[FrozenLake | Sokoban]) -> None:
    with pytest.raises(OptionError, match=r"^sizes: no such option; did you mean 'size'\?$"):
        world(sizes=4)
    with pytest.raises(OptionError, match="did you mean 'max_moves'"):
        world().reset(options={"maxmoves": 4})


@WORLDS
@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("size", 1),
        ("size", 400),
        ("size", 6.0),
        ("size", "6"),
        ("size", True),
        ("size", None),
        ("max_moves", 0),
        ("max_moves", -1),
        ("split", "test"),
        ("split", 3),
        ("instructions", "yes"),
        ("instructions", 1),
        ("format_penalty", -0.1),
        ("format_penalty", float("nan")),
        ("format_penalty", float("inf")),
        ("format_penalty", "0.1"),
        ("format_penalty", True),
        ("render_mode", "human"),
    ],
)
def test_a_bad_value_is_refused_with_its_name_wherever_it_comes_from(
    world: type[FrozenLake | Sokoban], option: str, value: Any
) -> None:
    with pytest.raises(OptionError) as refusal:
        world(**{option: value})
    assert refusal.value.option == option
    if option != "render_mode":
        with pytest.raises(OptionError, match=f"^{option}: "):
            world().reset(options={option: value})


@pytest.mark.parametrize(("option", "value"), [("slip", -0.1), ("slip", 1.5), ("slip", None), ("frozen", 2)])
def test_a_bad_chance_is_refused(option: str, value: Any) -> None:
    with pytest.raises(OptionError, match=f"^{option}: must be a number from 0 to 1"):
        FrozenLake(**{option: value})


@pytest.mark.parametrize(
    ("options", "option"),
    [
        ({"boxes": 0}, "boxes"),
        ({"boxes": 5}, "boxes"),
        ({"size": 4}, "size"),
        ({"max_moves": 8, "max_solution": 9}, "max_solution"),
        ({"min_solution": 11}, "min_solution"),
        ({"min_solution": 5, "max_solution": 4}, "min_solution"),
    ],
)
def test_a_room_that_cannot_be_is_refused(options: dict[str, Any], option: str) -> None:
    with pytest.raises(OptionError) as refusal:
        Sokoban(**options)
    assert refusal.value.option == option


def test_a_combination_without_levels_is_refused_instead_of_searched_for_ever() -> None:
    with pytest.raises(OptionError, match=r"^boxes: found no room with size=5, boxes=1"):
        Sokoban(size=5, min_solution=30, max_solution=40, max_moves=40).reset(seed=0)
    with pytest.raises(OptionError, match=r"^boxes: found no room with size=15, boxes=4"):
        Sokoban(size=15, boxes=4, min_solution=95).reset(seed=1)  # there are too many states to look so far
    with pytest.raises(OptionError, match=r"^split: found no lake with size=2, frozen=0\.0, split=validation"):
        FrozenLake(size=2, frozen=0.0, split="validation").reset(seed=0)  # there are eight lakes, seven in train


def test_an_unknown_split_is_answered_with_the_nearest_one() -> None:
    with pytest.raises(OptionError, match=r"split: 'evall' is not one of them; did you mean 'eval'\?"):
        FrozenLake(split="evall")


def test_options_of_a_reset_hold_for_that_episode_only() -> None:
    env = Sokoban(instructions=False, size=7)
    assert env.reset(seed=0, options={"size": 9})[0].count("\n") == 8
    assert env.reset(seed=0)[0].count("\n") == 6


def test_a_refused_reset_ends_the_episode_before_it() -> None:
    for env in (FrozenLake(), Sokoban()):
        env.reset(seed=0)
        with pytest.raises(OptionError):
            env.reset(seed=0, options={"size": 0})
        with pytest.raises(Exception, match="step before reset"):
            env.step("<answer>up</answer>")


def test_every_option_is_documented() -> None:
    for options in (LakeOptions, SokobanOptions):
        for field in fields(options):
            assert f"        {field.name}: " in str(options.__doc__)


def test_an_integer_where_a_number_is_meant_gives_the_same_level() -> None:
    whole, broken = LakeOptions(frozen=1), LakeOptions(frozen=1.0)
    draw_lake(12_345, whole)
    assert draw_lake(12_345, broken) == draw_lake(12_345, whole)
    assert draw_lake(54_321, broken) == draw_lake(54_321, whole)


def test_no_changes_give_the_same_options_back() -> None:
    options = LakeOptions(size=5)
    assert override(options, None) is override(options, {}) is options
    assert override(options, {"slip": 0.5}) == LakeOptions(size=5, slip=0.5)


def test_limits_grow_with_the_world_unless_they_are_given() -> None:
    assert [LakeOptions(size=size).move_limit for size in (2, 4, 5, 8)] == [10, 10, 15, 40]
    assert LakeOptions(size=8, max_moves=3).move_limit == 3
    small, large = SokobanOptions(), SokobanOptions(size=8, boxes=2)
    assert (small.least, small.longest, small.move_limit) == (2, 10, 15)
    assert (large.least, large.longest, large.move_limit) == (2, 26, 40)
    assert SokobanOptions(max_moves=1).least == SokobanOptions(max_moves=1).longest == 1
