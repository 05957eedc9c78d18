"""Sokoban's expert, against an independent slow search."""

from __future__ import annotations

import pytest

from envkit.environments.sokoban import SokobanExpert
from envkit.environments.sokoban.levels import draw_level
from envkit.types import Observation
from tests.environments.sokoban.slow_sokoban import slow_costs_after


@pytest.mark.parametrize(("size", "boxes", "levels"), [(6, 1, 20), (5, 3, 8)])
@pytest.mark.parametrize("max_table", [4000, 1])
def test_the_expert_returns_exactly_the_moves_that_shorten_the_solution(
    size: int, boxes: int, levels: int, max_table: int
) -> None:
    expert = SokobanExpert(max_table=max_table)
    for seed in range(levels):
        level = draw_level(seed, size, boxes, (2, 20))
        costs = slow_costs_after(level.board)
        nearer = [move for move, cost in costs.items() if cost is not None and cost[0] == level.moves - 1]
        assert list(expert.moves(Observation(level.board))) == nearer != []


@pytest.mark.parametrize(("size", "boxes", "levels"), [(6, 1, 30), (6, 2, 10)])
def test_a_state_is_tricky_when_a_push_loses_the_level(size: int, boxes: int, levels: int) -> None:
    expert = SokobanExpert()
    verdicts = []
    for seed in range(levels):
        board = draw_level(seed, size, boxes, (2, 10)).board
        verdicts.append(expert.is_hazardous(Observation(board)))
        assert verdicts[-1] == (None in slow_costs_after(board).values())
    assert {*verdicts} == {True, False}


def test_a_push_against_a_wall_without_targets_is_tricky_and_then_hopeless() -> None:
    for expert in (SokobanExpert(), SokobanExpert(max_table=1)):
        safe = Observation("#####\n#P__#\n#_X_#\n#_O_#\n#####")
        before = Observation("#####\n#___#\n#PX_#\n#_O_#\n#####")
        lost = Observation("#####\n#___#\n#_PX#\n#_O_#\n#####")
        assert (list(expert.moves(safe)), expert.is_hazardous(safe)) == (["right"], False)
        assert (list(expert.moves(before)), expert.is_hazardous(before)) == (["up"], True)
        assert (list(expert.moves(lost)), expert.is_hazardous(lost)) == ([], False)


def test_a_solution_beyond_the_search_limit_gives_no_move() -> None:
    board = draw_level(1, 8, 2, (20, 26)).board
    assert list(SokobanExpert(max_table=1, max_states=50).moves(Observation(board))) == []
    assert list(SokobanExpert(max_table=1).moves(Observation(board))) != []


@pytest.mark.parametrize(
    "text",
    [
        "X",
        "####\n#P_#\n#__#\n####",  # no box
        "####\n#√P#\n#__#\n####",  # solved
        "####\n#XO#\n#__#\n####",  # no player
        "XPO\n___\n___",  # no wall
        "#####\n#PX_#\n#OO_#\n#___#\n#####",  # more targets than boxes
        "\n".join(["#" * 20] * 20),
        "\n".join(["#" * 40, *["#" + "X" * 19 + "P" + "O" * 18 + "#"] * 38, "#" * 40]),  # a crowd
    ],
)
def test_the_expert_has_no_move_where_there_is_nothing_to_play(text: str) -> None:
    assert list(SokobanExpert().moves(Observation(text))) == []
    assert not SokobanExpert().is_hazardous(Observation(text))
