"""Sokoban's rules and rewards, on rooms drawn by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import envkit
from envkit.environments.sokoban import Sokoban, SokobanOptions
from envkit.errors import OptionError

TO_BOXOBAN = str.maketrans("#_O√XPS", "# .*$@+")


def _file(folder: Path, *rooms: str) -> str:
    """Write rooms in our own symbols to a level file; return its path."""
    path = folder / "rooms.txt"
    path.write_text("\n\n".join(rooms).translate(TO_BOXOBAN) + "\n")
    return str(path)


def _room(row: str, filler: str) -> str:
    """Return a room of 7x7 in which `row` lies between a wall and `filler`."""
    return "\n".join(["#######", row, filler, *["#######"] * 4])


@pytest.mark.parametrize(
    ("before", "filler", "after", "reward"),
    [
        ("#P_X__#", "#__O__#", "#_PX__#", -0.1),  # a step
        ("#PX_X_#", "#OO___#", "#_PXX_#", -0.1),  # a push that changes no target
        ("#PXOX_#", "#O____#", "#_P√X_#", 0.9),  # onto a target
        ("#P√_X_#", "#O____#", "#_SXX_#", -1.1),  # off a target
        ("#P√OX_#", "#_____#", "#_S√X_#", -0.1),  # from one target to the next
        ("#PXX__#", "#OO___#", "#PXX__#", -0.1),  # against two boxes
        ("#PXO__#", "#_____#", "#_P√__#", 10.9),  # the solution
    ],
)
def test_rewards_are_those_of_the_literature(
    before: str, filler: str, after: str, reward: float, tmp_path: Path
) -> None:
    env = Sokoban(level_file=_file(tmp_path, _room(before, filler)), instructions=False)
    assert env.reset(seed=0)[0] == _room(before, filler)
    board, paid, terminated, truncated, info = env.step("<answer>right</answer>")
    assert board == _room(after, filler)
    assert paid == pytest.approx(reward)
    assert (terminated, truncated, info["success"]) == (reward > 10, False, reward > 10)


def test_sparse_rewards_pay_the_solution_and_nothing_on_the_way(tmp_path: Path) -> None:
    room = _room("#PX_O_#", "#_____#")
    env = Sokoban(level_file=_file(tmp_path, room), reward="sparse", format_penalty=0.1)
    env.reset(seed=0)
    assert env.step("<answer>up</answer>")[1] == 0.0
    assert env.step("push")[1] == -0.1
    assert env.step("<answer>right</answer>")[1] == 0.0
    assert env.step("<answer>right</answer>")[1:4] == (1.0, True, False)


@pytest.mark.parametrize(
    ("row", "filler", "moves", "share"),
    [
        ("#PXO__#", "#O_X__#", ["right"], 1 / 2),
        ("#PXO__#", "#O_X__#", ["up"], 0.0),
        ("#P√_XO#", "#_____#", ["up"], 1 / 2),  # a box that was there from the start counts as any other
        ("#P√_XO#", "#_____#", ["right"], 0.0),  # unless it is pushed away
        ("#PX_X√#", "#OO_XO#", ["up"], 1 / 4),
    ],
)
def test_sparse_rewards_pay_the_share_of_boxes_on_targets_when_the_moves_run_out(
    row: str, filler: str, moves: list[str], share: float, tmp_path: Path
) -> None:
    path = _file(tmp_path, _room(row, filler))
    answers = [f"<answer>{move}</answer>" for move in moves] + ["<answer>up</answer>"]
    env = Sokoban(level_file=path, reward="sparse", max_moves=len(answers))
    env.reset(seed=0)
    steps = [env.step(answer)[1:4] for answer in answers]
    assert steps == [(0.0, False, False)] * len(moves) + [(share, False, True)]

    vector = envkit.make_vec("Sokoban-v0", 3, level_file=path, reward="sparse", max_moves=len(answers))
    vector.reset(seed=0)
    paid = [vector.step((answer,) * 3)[1] for answer in answers]
    assert np.array_equal(paid, [[0.0] * 3] * len(moves) + [[share] * 3])


def test_rooms_of_a_file_are_drawn_about_equally_often(tmp_path: Path) -> None:
    rooms = [_room(row, "#_____#") for row in ("#PXO__#", "#P_XO_#", "#P__XO#")]
    env = Sokoban(level_file=_file(tmp_path, *rooms), instructions=False)
    drawn = [env.reset(seed=seed) for seed in range(300)]
    counts = [sum(board == room for board, _ in drawn) for room in rooms]
    assert sum(counts) == 300
    assert min(counts) > 70
    assert all("level" not in info for _, info in drawn)  # nobody knows their shortest solutions
    assert env.reset(seed=17)[0] == drawn[17][0]


def test_rooms_from_a_file_have_the_size_of_the_file_and_a_limit_of_120_moves(tmp_path: Path) -> None:
    path = _file(tmp_path, _room("#PXO__#", "#_____#"))
    options = SokobanOptions(level_file=path)
    assert (options.side, options.move_limit) == (7, 120)
    assert SokobanOptions(level_file=path, size=7, max_moves=9).move_limit == 9
    env = Sokoban(level_file=path)
    text, _ = env.reset(seed=0)
    assert "You have 120 moves" in text
    assert [env.step("wait")[3] for _ in range(120)] == [False] * 119 + [True]


@pytest.mark.parametrize(
    ("option", "value"),
    [("size", 6), ("boxes", 1), ("moves", [2, 5]), ("pushes", [1, 3]), ("split", "train"), ("num_levels", 4)],
)
def test_options_of_drawn_levels_are_refused_with_a_file(option: str, value: Any, tmp_path: Path) -> None:
    path = _file(tmp_path, _room("#PXO__#", "#_____#"))
    with pytest.raises(OptionError, match=f"^{option}: "):
        Sokoban(level_file=path, **{option: value})
    with pytest.raises(OptionError, match=f"^{option}: "):
        Sokoban(level_file=path).reset(options={option: value})


def test_moves_above_the_limit_are_refused_with_both_options() -> None:
    message = r"^moves: go up to 10, above max_moves \(4\); set moves=\[1, 4\], or max_moves to at least 10$"
    with pytest.raises(OptionError, match=message):
        envkit.make("SimpleSokoban-v0", max_moves=4)


def test_a_level_file_is_set_by_make_and_not_by_reset(tmp_path: Path) -> None:
    path = _file(tmp_path, _room("#PXO__#", "#_____#"))
    refused = r"^level_file: cannot be set by reset, only by make or register\(\.\.\., options=\.\.\.\)$"
    with pytest.raises(OptionError, match=refused):
        Sokoban().reset(options={"level_file": path})
    with pytest.raises(OptionError, match=refused):
        Sokoban(level_file=path).reset(options={"level_file": f"{path}2"})
    board, _ = Sokoban(level_file=path).reset(seed=0, options={"level_file": path})
    assert board == Sokoban(level_file=path).reset(seed=0)[0]
    with pytest.raises(OptionError, match=r"^level_file: "):
        envkit.make_vec("Sokoban-v0", 2).reset(options={"level_file": path})
    for other in (3, "", Path(path), [path], str(tmp_path / "none.txt")):
        with pytest.raises(OptionError, match=r"^level_file: "):
            Sokoban(level_file=other)  # type: ignore[arg-type]
