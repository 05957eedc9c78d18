"""Sokoban's levels and its expert, against a slow search that shares no code with them."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterator
from typing import TypeAlias

import pytest

from envkit.environments.sokoban import Sokoban, SokobanExpert, SokobanOptions, draw_level
from envkit.environments.sokoban.levels import Level
from envkit.types import Observation

Cell: TypeAlias = tuple[int, int]
State: TypeAlias = tuple[Cell, frozenset[Cell]]

WAYS = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
KINDS = [(5, 1), (5, 3), (6, 1), (6, 2), (6, 3), (7, 2), (8, 1), (8, 2)]


@pytest.mark.parametrize(("size", "boxes"), KINDS)
def test_levels_have_the_shortest_solution_that_they_claim(size: int, boxes: int) -> None:
    for seed in range(25 if boxes == 1 else 8):
        level = _level(seed, size=size, boxes=boxes)
        floor, targets, start = _read(level.board)
        assert _solve(floor, targets, start) == level.shortest


@pytest.mark.parametrize(("size", "boxes"), [*KINDS, (8, 4), (10, 4), (13, 1), (13, 4), (15, 2)])
def test_levels_are_walled_complete_and_within_their_limits(size: int, boxes: int) -> None:
    options = SokobanOptions(size=size, boxes=boxes)
    for seed in range(10):
        level = _level(seed, size=size, boxes=boxes)
        rows = level.board.split("\n")
        assert [len(row) for row in rows] == [size] * size
        assert {*rows[0], *rows[-1], *(row[0] for row in rows), *(row[-1] for row in rows)} == {"#"}
        count = {symbol: level.board.count(symbol) for symbol in "XO√PS"}
        assert count["X"] + count["√"] == count["O"] + count["√"] + count["S"] == boxes
        assert count["P"] + count["S"] == 1
        assert count["X"] >= 1
        assert 2 <= level.shortest <= options.longest <= options.move_limit


def test_levels_at_the_defaults_have_the_documented_lengths() -> None:
    lengths = [_level(seed).shortest for seed in range(2000)]
    assert {*lengths} == {*range(2, 11)}
    assert statistics.median(lengths) == 4


def test_the_length_of_the_solution_can_be_asked_for() -> None:
    env = Sokoban(min_solution=6, max_solution=7)
    told = [env.reset(seed=seed)[1]["level"] for seed in range(60)]
    assert {"shortest": 6} in told
    assert all(level in ({"shortest": 6}, {"shortest": 7}) for level in told)
    assert Sokoban(min_solution=1, max_solution=1).reset(seed=0)[1]["level"] == {"shortest": 1}
    assert all(20 <= draw_level(seed, 8, 2, 20, 26).shortest <= 26 for seed in range(10))


def test_boxes_start_away_from_targets_wherever_the_room_allows() -> None:
    boards = [_level(seed, size=8, boxes=3).board for seed in range(20)]
    assert sum(board.count("√") for board in boards) == 0


@pytest.mark.parametrize(("size", "boxes", "episodes"), [(6, 1, 200), (6, 2, 50), (8, 2, 12), (8, 4, 2), (13, 1, 3)])
def test_the_expert_solves_every_level_by_a_shortest_way(size: int, boxes: int, episodes: int) -> None:
    env, expert = Sokoban(size=size, boxes=boxes), SokobanExpert()
    for seed in range(episodes):
        text, info = env.reset(seed=seed)
        taken, terminated, truncated = 0, False, False
        while not (terminated or truncated):
            text, _, terminated, truncated, _ = env.step(expert.answer(expert.moves(Observation(text))[-1]))
            taken += 1
        assert terminated
        assert info["level"] == {"shortest": taken}


@pytest.mark.parametrize(("size", "boxes"), [(6, 1), (6, 2)])
def test_the_expert_names_exactly_the_moves_that_come_nearer(size: int, boxes: int) -> None:
    expert = SokobanExpert()
    tricky = 0
    for seed in range(25 if boxes == 1 else 6):
        level = _level(seed, size=size, boxes=boxes)
        floor, targets, start = _read(level.board)
        shortest = _solve(floor, targets, start)
        after = {way: _solve(floor, targets, state) for way, state in _moves(floor, start)}
        observation = Observation(level.board)
        assert list(expert.moves(observation)) == [way for way, moves in after.items() if moves == shortest - 1]
        assert expert.is_tricky(observation) == (-1 in after.values())
        tricky += -1 in after.values()
    assert tricky > 0


def test_a_search_that_is_cut_short_finds_the_same_moves_from_ahead() -> None:
    whole, cut = SokobanExpert(), SokobanExpert(max_states_back=40)
    for seed in range(30):
        observation = Observation(_level(seed, size=7, boxes=2).board)
        assert list(cut.moves(observation)) == list(whole.moves(observation)) != []


def test_a_state_out_of_reach_of_both_searches_has_no_known_move_and_is_not_tricky() -> None:
    expert = SokobanExpert(max_states_back=1, max_states_ahead=1)
    observation = Observation(_level(1, size=8, boxes=2).board)
    assert list(expert.moves(observation)) == []
    assert not expert.is_tricky(observation)


def test_a_push_against_a_wall_without_targets_is_tricky_and_then_hopeless() -> None:
    expert = SokobanExpert()
    safe = Observation("#####\n#P__#\n#_X_#\n#_O_#\n#####")
    before = Observation("#####\n#___#\n#PX_#\n#_O_#\n#####")
    lost = Observation("#####\n#___#\n#_PX#\n#_O_#\n#####")
    assert (list(expert.moves(safe)), expert.is_tricky(safe)) == (["right"], False)
    assert (list(expert.moves(before)), expert.is_tricky(before)) == (["up"], True)
    assert (list(expert.moves(lost)), expert.is_tricky(lost)) == ([], False)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Welcome!",
        "####\n#P_#\n#__#\n####",  # no box
        "####\n#√P#\n#__#\n####",  # solved
        "####\n#XO#\n#__#\n####",  # no player
        "XPO\n___\n___",  # no wall
        "####\n#PX_\n#_O#\n####",  # a gap in the wall
        "#####\n#PX_#\n#OO_#\n#___#\n#####",  # more targets than boxes
        "#####\n#PX?#\n#_O_#\n#___#\n#####",  # a symbol that no room has
        "\n".join(["#" * 20] * 20),
    ],
)
def test_the_expert_has_no_move_where_there_is_nothing_to_play(text: str) -> None:
    assert list(SokobanExpert().moves(Observation(text))) == []
    assert not SokobanExpert().is_tricky(Observation(text))


def _level(seed: int, *, size: int = 6, boxes: int = 1) -> Level:
    options = SokobanOptions(size=size, boxes=boxes)
    return draw_level(seed, size, boxes, options.least, options.longest)


def _read(board: str) -> tuple[frozenset[Cell], frozenset[Cell], State]:
    tiles = {(row, column): tile for row, line in enumerate(board.split("\n")) for column, tile in enumerate(line)}
    floor = frozenset(cell for cell, tile in tiles.items() if tile != "#")
    targets = frozenset(cell for cell, tile in tiles.items() if tile in "O√S")
    boxes = frozenset(cell for cell, tile in tiles.items() if tile in "X√")
    [player] = [cell for cell, tile in tiles.items() if tile in "PS"]
    return floor, targets, (player, boxes)


def _moves(floor: frozenset[Cell], state: State) -> Iterator[tuple[str, State]]:
    (row, column), boxes = state
    for way, (down, right) in WAYS.items():
        to = (row + down, column + right)
        beyond = (row + 2 * down, column + 2 * right)
        if to in boxes and beyond in floor and beyond not in boxes:
            yield way, (to, boxes - {to} | {beyond})
        elif to in floor and to not in boxes:
            yield way, (to, boxes)


def _solve(floor: frozenset[Cell], targets: frozenset[Cell], start: State) -> int:
    """Moves of a shortest solution by searching forwards; -1 when there is none."""
    found = {start: 0}
    queue = deque([start])
    while queue:
        state = queue.popleft()
        if state[1] == targets:
            return found[state]
        for _, after in _moves(floor, state):
            if after not in found:
                found[after] = found[state] + 1
                queue.append(after)
    return -1
