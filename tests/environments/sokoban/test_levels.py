"""Sokoban's levels; test_solver.py shows that they are as difficult as they claim."""

from __future__ import annotations

import statistics
from collections import Counter

import pytest

from envkit.environments.sokoban.levels import draw_level


@pytest.mark.parametrize(("size", "boxes", "high"), [(5, 4, 20), (6, 1, 10), (8, 4, 53), (15, 2, 50)])
def test_levels_are_enclosed_by_walls_and_complete(size: int, boxes: int, high: int) -> None:
    for seed in range(10):
        board = draw_level(seed, size, boxes, (2, high)).board
        rows = board.split("\n")
        assert [len(row) for row in rows] == [size] * size
        assert {*rows[0], *rows[-1], *(row[0] for row in rows), *(row[-1] for row in rows)} == {"#"}
        count = Counter(board)
        assert count["X"] + count["√"] == count["O"] + count["√"] + count["S"] == boxes
        assert count["P"] + count["S"] == 1
        assert count["X"] >= 1


def test_levels_at_the_defaults_have_the_documented_lengths() -> None:
    lengths = [draw_level(seed, 6, 1, (2, 10)).moves for seed in range(2000)]
    assert {*lengths} == {*range(2, 11)}
    assert statistics.median(lengths) == 4


@pytest.mark.parametrize(("size", "boxes", "high", "levels"), [(6, 2, 20, 400), (8, 4, 53, 100)])
def test_levels_with_several_boxes_are_spread_over_the_range(size: int, boxes: int, high: int, levels: int) -> None:
    lengths = sorted(draw_level(seed, size, boxes, (2, high)).moves for seed in range(levels))
    assert len({*lengths}) > 0.7 * (high - 1)
    assert lengths[levels // 10] <= 2 + 0.2 * high
    assert 0.3 * high <= lengths[levels // 2] <= 0.6 * high
    assert lengths[levels * 9 // 10] >= 0.6 * high


def test_boxes_start_off_targets_if_the_room_allows() -> None:
    boards = [draw_level(seed, 8, 3, (10, 40)).board for seed in range(40)]
    assert sum(board.count("√") for board in boards) <= 2
    # Three boxes cannot come home in one move, so two of them have to be there.
    assert draw_level(0, 8, 3, (1, 1)).board.count("√") == 2
