"""Draws a Sokoban room and a frozen lake into `docs/pictures/`. ``--check`` only reports outdated pictures."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.image import imread, imsave
from numpy.typing import NDArray

from envkit.environments.boards.game import BoardGame
from envkit.environments.boards.pictures import paint, read_tiles
from envkit.environments.frozen_lake import LakeGame
from envkit.environments.sokoban import SokobanGame

FOLDER = Path(__file__).parent / "pictures"

ROOM = """\
########
#_____√#
#______#
#___P__#
#_#_X__#
####O__#
#####__#
########"""
"""A Sokoban room with two boxes. One box is on a target, and one push moves the other box onto a target."""

LAKE = """\
________
_P___O__
___O____
_O____O_
____O___
_O____O_
__O_O___
O______G"""


def picture(board: str, game: type[BoardGame[Any]]) -> NDArray[np.uint8]:
    codes = np.array([[game.physics.symbols.index(symbol) for symbol in line] for line in board.split("\n")], np.uint8)
    return paint(codes, read_tiles(game.tiles))


def main() -> None:
    pictures = {
        FOLDER / "sokoban.png": picture(ROOM, SokobanGame),
        FOLDER / "frozen_lake.png": picture(LAKE, LakeGame),
    }
    stale = [path for path, frame in pictures.items() if not path.exists() or not np.array_equal(read(path), frame)]
    if "--check" in sys.argv[1:]:
        sys.exit(f"not up to date (docs/draw_pictures.py): {', '.join(path.name for path in stale)}" if stale else 0)
    FOLDER.mkdir(exist_ok=True)
    for path in stale:
        imsave(path, pictures[path])
        print(f"wrote {path.relative_to(FOLDER.parent.parent)}")


def read(path: Path) -> NDArray[np.uint8]:
    """Return the picture in a file as red, green and blue values from 0 to 255; `imread` returns values from 0 to 1."""
    frame: NDArray[np.uint8] = np.rint(imread(path)[..., :3] * 255).astype(np.uint8)
    return frame


if __name__ == "__main__":
    main()
