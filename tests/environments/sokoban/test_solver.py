"""The solver, against an independent slow search, and against the numbers of the levels."""

from __future__ import annotations

from random import Random

import pytest

from envkit.environments.board import MOVES
from envkit.environments.sokoban import play
from envkit.environments.sokoban.levels import draw_level
from envkit.environments.sokoban.solver import solve
from envkit.errors import SearchLimitError, UsageError
from tests.environments.claimed_levels import KINDS, Kind, broken_claims, cost_of
from tests.environments.sokoban.slow_sokoban import slow_cost


def test_a_plan_has_the_fewest_pushes_among_the_shortest() -> None:
    # Pushing to the right, down and back takes 7 moves, too, but 3 pushes.
    assert solve("######\n###__#\n##___#\n#PX__#\n#_O__#\n######") == (
        *("down", "right", "right", "up", "up", "left"),
        "down",
    )


def test_a_solved_room_needs_no_move() -> None:
    assert solve("######\n#P√__#\n#___√#\n######") == ()


@pytest.mark.parametrize(
    "board",
    [
        "#####\n#X__#\n#_P_#\n#__O#\n#####",  # in a corner
        "#####\n#_X_#\n#_P_#\n#__O#\n#####",  # at a wall without a target
        "######\n#____#\n#_XX_#\n#_XX_#\n#POO_#\n#_OO_#\n######",  # four that hold each other
        "#######\n#P#___#\n###X__#\n###_O_#\n#######",  # the player cannot get to it
        "######\n#_P__#\n#_X__#\n###X##\n##_OO#\n######",  # one that bars the way for good
    ],
)
def test_a_room_without_a_solution_has_no_plan(board: str) -> None:
    assert solve(board) is None
    assert slow_cost(board) is None


@pytest.mark.parametrize(
    ("size", "boxes", "high", "levels"), [(5, 3, 20, 20), (6, 1, 10, 60), (6, 2, 20, 30), (8, 2, 26, 20)]
)
def test_plans_are_optimal_wherever_play_leads(size: int, boxes: int, high: int, levels: int) -> None:
    lost = 0
    for seed in range(levels):
        board = draw_level(seed, size, boxes, (2, high)).board
        rng = Random(seed)
        for _ in range(10):
            board = play(board, rng.choice(MOVES))
        cost = slow_cost(board)
        plan = solve(board)
        assert (None if plan is None else cost_of(board, plan)) == cost
        lost += cost is None
    assert lost > 0


@pytest.mark.parametrize(
    ("size", "boxes", "moves"), [(8, 4, (10, 53)), (10, 4, (30, 66)), (13, 3, (20, 60)), (15, 1, (2, 25))]
)
def test_plans_for_large_rooms_are_as_long_as_the_levels_say(size: int, boxes: int, moves: tuple[int, int]) -> None:
    for seed in range(5):
        level = draw_level(seed, size, boxes, moves)
        assert cost_of(level.board, solve(level.board)) == (level.moves, level.pushes)


def test_a_room_need_not_be_a_square() -> None:
    assert solve("#######\n#PX__O#\n#######") == ("right", "right", "right")


def test_a_large_room_without_inner_walls_is_solved_too() -> None:
    rows = ("P______", "_X___O_", "_______", "__XX___", "_O_____", "____O__", "_______")
    board = "\n".join(["#########", *(f"#{row}#" for row in rows), "#########"])
    assert cost_of(board, solve(board)) == (16, 9)  # `slow_cost` finds the same in many seconds


def test_a_search_at_its_limit_raises_an_error() -> None:
    board = draw_level(1, 8, 2, (20, 26)).board
    with pytest.raises(SearchLimitError, match=r"found no solution in \d+ states \(limit \d+\)"):
        solve(board, max_states=50)
    assert solve(board, max_states=5000) is not None


@pytest.mark.parametrize(
    "board", ["", "\n", "P", "#####\n#PX_#\n#_OO#\n#####", "####\n#PX_\n#_O#\n####", "###\n#P#\n###"]
)
def test_an_invalid_room_is_refused(board: str) -> None:
    with pytest.raises(UsageError, match="must be a rectangle enclosed by walls"):
        solve(board)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_levels_are_solved_in_exactly_the_moves_and_pushes_that_they_claim(kind: Kind) -> None:
    assert broken_claims(kind, KINDS[kind] // 25) == []
