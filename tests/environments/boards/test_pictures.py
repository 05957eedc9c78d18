"""Pictures of boards: frames, tiles and terminal colours."""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from envkit.environments.boards.game import BoardGame
from envkit.environments.boards.pictures import colour, paint, read_tiles
from envkit.environments.frozen_lake import LakeGame
from envkit.environments.sokoban import SokobanGame

ROOT = Path(__file__).parents[3]
ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
ROOM = "#####\n#P_O#\n#_X√#\n#__S#\n#####"
GAMES = pytest.mark.parametrize(
    ("game", "symbols"),
    [pytest.param(SokobanGame, "#_O√XPS", id="sokoban"), pytest.param(LakeGame, "_OGPX√", id="frozen_lake")],
)


def numbered(count: int, pixels: int) -> NDArray[np.uint8]:
    """Tiles of which no two samples are equal."""
    assert count * pixels**2 * 3 <= 256
    return np.arange(count * pixels**2 * 3, dtype=np.uint8).reshape(count, pixels, pixels, 3)


def test_every_cell_of_a_frame_is_the_tile_of_its_code() -> None:
    tiles = numbered(5, 4)
    codes = np.array([[0, 3, 1], [4, 2, 0]], np.uint8)
    frame = paint(codes, tiles)
    assert frame.dtype == np.uint8
    assert frame.shape == (8, 12, 3)
    for row in range(2):
        for column in range(3):
            cell = frame[4 * row : 4 * row + 4, 4 * column : 4 * column + 4]
            assert cell.tolist() == tiles[codes[row, column]].tolist()


def test_a_batch_is_painted_like_its_single_boards() -> None:
    tiles = numbered(7, 2)
    codes = np.random.default_rng(0).integers(0, 7, (2, 3, 5, 4), dtype=np.uint8)
    frames = paint(codes, tiles)
    assert frames.shape == (2, 3, 10, 8, 3)
    assert frames.tolist() == [[paint(board, tiles).tolist() for board in boards] for boards in codes]


def test_a_code_without_a_tile_is_refused() -> None:
    with pytest.raises(IndexError, match="a cell has code 2, but there are only 2 tiles"):
        paint(np.array([[0, 1], [2, 0]], np.uint8), numbered(2, 3))


@GAMES
def test_there_is_one_tile_for_each_symbol_and_each_differs_clearly_from_the_others(
    game: type[BoardGame[Any]], symbols: str
) -> None:
    tiles = read_tiles(game.tiles)
    assert tiles.dtype == np.uint8
    assert tiles.shape == (len(symbols), 32, 32, 3)
    grey = tiles @ np.array([0.299, 0.587, 0.114])  # without hue, too
    for one, other in combinations(range(len(symbols)), 2):
        different = np.abs(grey[one] - grey[other]) > 32
        assert different.mean() > 0.1, f"{symbols[one]} and {symbols[other]} look alike"


@GAMES
def test_every_symbol_has_a_style_of_its_own(game: type[BoardGame[Any]], symbols: str) -> None:
    assert "".join(game.styles) == symbols
    assert len(set(game.styles.values())) == len(symbols)


def test_colours_follow_the_meaning_and_characters_the_vocabulary() -> None:
    shown = dict(zip("#_O√XPS", "W.GCBA@", strict=True))
    coloured = colour(ROOM, SokobanGame.styles, shown)
    assert ESCAPE.sub("", coloured) == "WWWWW\nWA.GW\nW.BCW\nW..@W\nWWWWW"
    assert ESCAPE.findall(coloured) == ESCAPE.findall(colour(ROOM, SokobanGame.styles, {}))


def test_the_pictures_in_the_documents_are_up_to_date() -> None:
    command = [sys.executable, str(ROOT / "docs/draw_pictures.py"), "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
