"""Options of the environments: values that are refused, and the messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import envkit
from envkit.environments.board import find_board
from envkit.environments.frozen_lake import FrozenLake, LakeOptions
from envkit.environments.options import check_path
from envkit.environments.sokoban import Sokoban, SokobanOptions
from envkit.errors import OptionError
from envkit.types import Observation
from envkit.wiring.environments import open_expert

ENV_CLASSES = pytest.mark.parametrize("env_class", [FrozenLake, Sokoban])
GAMES = pytest.mark.parametrize(("env_id", "ours"), [("FrozenLake-v0", "_OGPX√"), ("Sokoban-v0", "#_O√XPS")])


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("size", 1),
        ("size", 6.0),
        ("size", True),
        ("max_moves", 0),
        ("max_moves", 10_001),
        ("num_levels", 0),
        ("num_levels", "all"),
        ("actions_per_turn", 101),
        ("actions_per_turn", None),
        ("symbols", 7),
        ("split", "test"),
        ("instructions", "yes"),
        ("format_penalty", -0.1),
        ("format_penalty", float("nan")),
        ("format_penalty", "0.1"),
        ("format_penalty", 10**400),
        ("render_mode", "human"),
        ("observation", "pixels"),
        ("action", "number"),
    ],
)
def test_a_bad_value_is_refused_with_its_name_in_every_place(option: str, value: Any) -> None:
    with pytest.raises(OptionError) as refusal:
        FrozenLake(**{option: value})
    assert refusal.value.option == option
    if option not in ("render_mode", "observation", "action"):
        with pytest.raises(OptionError, match=f"^{option}: "):
            FrozenLake().reset(options={option: value})


@pytest.mark.parametrize(
    ("option", "value"), [("slip", -0.1), ("slip", 1.5), ("slip", None), ("slip", -(10**400)), ("frozen", 2)]
)
def test_a_bad_chance_is_refused(option: str, value: Any) -> None:
    with pytest.raises(OptionError, match=f"^{option}: must be a number from 0 to 1"):
        FrozenLake(**{option: value})


@pytest.mark.parametrize(
    ("options", "option"),
    [
        ({"boxes": 0}, "boxes"),
        ({"boxes": 5}, "boxes"),
        ({"size": 16}, "size"),
        ({"max_moves": 8, "moves": [2, 9]}, "moves"),
        ({"moves": [5, 4]}, "moves"),
        ({"moves": [5, 6, 7]}, "moves"),
        ({"moves": [5, 6.0]}, "moves"),
        ({"moves": 5}, "moves"),
        ({"moves": [5, 501]}, "moves"),
        ({"pushes": [0, 3]}, "pushes"),
        ({"pushes": [2, 11]}, "pushes"),  # more than the ten moves of the longest solution
        ({"moves": [2, 5], "pushes": [1, 6]}, "pushes"),
        ({"pushes": {"1": 2}}, "pushes"),
        ({"reward": "none"}, "reward"),
    ],
)
def test_an_impossible_room_is_refused(options: dict[str, Any], option: str) -> None:
    for refuse in (lambda: Sokoban(**options), lambda: Sokoban().reset(options=options)):
        with pytest.raises(OptionError) as refusal:
            refuse()
        assert refusal.value.option == option


def test_a_combination_without_levels_is_refused_after_a_bounded_search() -> None:
    with pytest.raises(OptionError, match=r"^moves: found no level of size 5 with 1 box .* 30 to 40 moves"):
        Sokoban(size=5, moves=[30, 40], max_moves=40).reset(seed=0)
    with pytest.raises(OptionError, match=r"^pushes: found no level of size 6 with 1 box .* 9 to 9 pushes"):
        Sokoban(size=6, moves=[9, 9], pushes=[9, 9]).reset(seed=0)
    with pytest.raises(OptionError, match=r"^split: found no lake with size=2, frozen=0\.0, split=validation"):
        FrozenLake(size=2, frozen=0.0, split="validation").reset(seed=0)  # there are eight lakes, seven in train


def test_an_integer_in_place_of_a_float_gives_the_same_level() -> None:
    for seed, first, second in ((12_345, 1, 1.0), (54_321, 1.0, 1)):  # levels that were drawn before are remembered
        assert FrozenLake(frozen=first).reset(seed=seed) == FrozenLake(frozen=second).reset(seed=seed)


def test_move_limits_grow_with_the_size_unless_they_are_set() -> None:
    assert [LakeOptions(size=size).move_limit for size in (2, 4, 5, 8)] == [10, 10, 15, 40]
    assert LakeOptions(size=8, max_moves=3).move_limit == 3
    small, large = SokobanOptions(), SokobanOptions(size=8, boxes=2)
    assert (small.solution, small.move_limit) == ((2, 10), 15)
    assert (large.solution, large.move_limit) == ((2, 26), 40)
    assert SokobanOptions(max_moves=1).solution == (1, 1)
    assert SokobanOptions(moves=[4, 9]).move_limit == 15
    assert SokobanOptions(moves=[4, 21]).move_limit == 31
    assert SokobanOptions(moves=[4, 21], max_moves=21).move_limit == 21


@ENV_CLASSES
def test_none_means_the_default_value(env_class: type[FrozenLake | Sokoban]) -> None:
    default = env_class()
    named = env_class(size=None, max_moves=None, split=None, num_levels=None, symbols=None)
    assert named.reset(seed=4) == default.reset(seed=4)
    assert Sokoban(boxes=None, moves=None, pushes=None, level_file=None).reset(seed=4) == Sokoban().reset(seed=4)
    assert FrozenLake(map=None).reset(seed=4) == FrozenLake().reset(seed=4)
    larger = env_class(size=7)
    assert larger.reset(seed=4, options={"size": None}) == default.reset(seed=4)


@GAMES
def test_boards_and_rules_show_the_symbols_that_were_chosen(env_id: str, ours: str) -> None:
    symbols = "\N{SNOWMAN}{}%\\\N{WHITE CHESS KING}\N{GREEK SMALL LETTER PI}"[: len(ours)]
    to_symbols = str.maketrans(ours, symbols)
    plain, shown = envkit.make(env_id), envkit.make(env_id, symbols=symbols)
    for seed in range(30):
        (before, info), (after, other_info) = plain.reset(seed=seed), shown.reset(seed=seed)
        assert info == other_info
        assert find_board(after) == find_board(before).translate(to_symbols)
        rules = after.removesuffix(find_board(after))
        assert all(
            f"{symbol} is " in rules or f"{symbol} means " in rules or f"{symbol} that " in rules for symbol in symbols
        )
        for move in ("up", "left", "down", "right", "sideways"):
            one, other = plain.step(f"<answer>{move}</answer>"), shown.step(f"<answer>{move}</answer>")
            assert find_board(other[0]) == find_board(one[0]).translate(to_symbols)
            assert other[1:] == one[1:]
            if one[2] or one[3]:
                break


@GAMES
def test_spaced_boards_are_the_same_with_a_space_between_the_symbols_of_a_line(env_id: str, ours: str) -> None:
    plain = envkit.make(env_id, instructions=False, render_mode="text")
    spaced = envkit.make(env_id, instructions=False, render_mode="text", spaced=True)
    for seed in range(10):
        before: tuple[Any, ...] = plain.reset(seed=seed)
        after: tuple[Any, ...] = spaced.reset(seed=seed)
        for _ in range(3):
            assert after[0] == "\n".join(" ".join(line) for line in before[0].split("\n"))
            assert after[1:] == before[1:]
            assert spaced.render() == after[0]
            if True in before[2:4]:
                break
            before, after = plain.step("<answer>left</answer>"), spaced.step("<answer>left</answer>")


@GAMES
def test_an_expert_with_the_symbols_wins_and_one_without_has_no_move(env_id: str, ours: str) -> None:
    for symbols in ("W.GCBA@"[: len(ours)], ours[1:] + ours[0]):
        expert = open_expert(env_id, {"symbols": symbols})
        env = envkit.make(env_id, symbols=symbols)
        for seed in range(20):
            text, info = env.reset(seed=seed)
            for _ in range(info["level"]["shortest"]):
                text, *_, info = env.step(expert.answer(expert.moves(Observation(text))[0]))
            assert info["success"] is True
            assert list(expert.moves(Observation(text))) == []
    text, _ = envkit.make(env_id, symbols="W.GCBA@"[: len(ours)]).reset(seed=0)
    assert list(open_expert(env_id).moves(Observation(text))) == []


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("", "got ''"),
        ("  ", "got '  '"),
        (3, "got 3"),
        (Path("a/b"), r"got .*\('a/b'\); use 'a/b'"),
    ],
)
def test_a_path_is_a_string(value: Any, message: str) -> None:
    with pytest.raises(OptionError, match=f"^file: must be the path of a file or folder, as a string, {message}$"):
        check_path("file", value)
    check_path("file", "a/b")
    check_path("file", None)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda symbols: symbols[:-1],
        lambda symbols: f"{symbols}Z",
        lambda symbols: "",
        lambda symbols: symbols[0] + symbols[:-1],
        lambda symbols: f" {symbols[1:]}",
        lambda symbols: f"\n{symbols[1:]}",
        lambda symbols: f"\t{symbols[1:]}",
        lambda symbols: f"\x00{symbols[1:]}",
        lambda symbols: f"\ud800{symbols[1:]}",
        lambda symbols: f"\N{NO-BREAK SPACE}{symbols[1:]}",
        lambda symbols: f"\N{ZERO WIDTH SPACE}{symbols[1:]}",
    ],
)
def test_ambiguous_symbols_are_refused(spoil: Callable[[str], str]) -> None:
    symbols = spoil("abcdef")
    for refuse in (
        lambda: envkit.make("FrozenLake-v0", symbols=symbols),
        lambda: envkit.make_vec("FrozenLake-v0", 2, symbols=symbols),
        lambda: envkit.make("FrozenLake-v0").reset(options={"symbols": symbols}),
    ):
        with pytest.raises(OptionError, match=r"^symbols: must be 6 different printable characters.*_OGPX√"):
            refuse()


@ENV_CLASSES
@pytest.mark.parametrize("count", [1, 7])
def test_num_levels_gives_exactly_that_many_levels_for_all_seeds(
    env_class: type[FrozenLake | Sokoban], count: int
) -> None:
    env = env_class(num_levels=count, instructions=False)
    seeds = range(15 * count)
    low = {env.reset(seed=seed)[0] for seed in seeds}
    assert len(low) == count
    assert {env.reset(seed=2**40 + seed)[0] for seed in seeds} == low
    assert {env.reset()[0] for _ in seeds} == low
    drawn = env_class(instructions=False)
    assert {drawn.reset(seed=number)[0] for number in range(count)} == low


def test_levels_come_about_equally_often() -> None:
    env = FrozenLake(num_levels=5, instructions=False)
    often = Counter(env.reset(seed=seed)[0] for seed in range(2000))
    assert len(often) == 5
    assert all(abs(times - 400) < 80 for times in often.values())  # four standard deviations and a half
