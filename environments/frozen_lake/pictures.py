"""Pictures of cells (tiles) and terminal colours of the frozen lake. Tiles differ in shape as well as in colour."""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from ..boards.pictures import INK, PIXELS, Canvas, disc, draw_person, grown, line, polygon, rectangle, stacked

STYLES = {
    "_": "38;5;67;48;5;195",
    "O": "1;38;5;195;48;5;18",
    "G": "1;38;5;16;48;5;220",
    "P": "1;38;5;231;48;5;125",
    "X": "1;38;5;231;48;5;124",
    "√": "1;38;5;231;48;5;29",
}
"""Text and background colour of each symbol. Terminal themes do not change these colours of the 256-colour palette."""

_ICE, _EDGE, _CRACK = "#d8eef8", "#c0deec", "#b3d6e7"
_SNOW, _WATER, _DEEP, _RIPPLE = "#ffffff", "#123c5c", "#0a2740", "#4f8fb8"
_FLAG, _POLE = "#d1341f", "#5b4636"
_COAT, _CAP = "#d9730d", "#5b3a8e"


@cache
def draw_tiles() -> NDArray[np.uint8]:
    """Return the pictures of the cells in the order of ``_OGPX√``, of shape (6, PIXELS, PIXELS, 3)."""
    return stacked([_ice(), _hole(), _goal(), _player(), _player_in_hole(), _player_on_goal()])


def _ice() -> Canvas:
    canvas = Canvas(_EDGE)
    canvas.fill(rectangle(0.5, 0.5, 31.5, 31.5, radius=1.5), _ICE)
    canvas.fill(polygon((3, 13), (13, 3), (17, 3), (3, 17)), _SNOW, 0.4)
    canvas.fill(polygon((3, 20), (20, 3), (22, 3), (3, 22)), _SNOW, 0.4)
    crack = line((31, 19), (26, 21), (24, 25), (19, 27), width=0.8) | line((24, 25), (26, 29), width=0.7)
    canvas.fill(crack | line((26, 21), (23, 19.5), width=0.7), _CRACK)
    return canvas


def _hole() -> Canvas:
    canvas = _ice()
    _draw_hole(canvas)
    canvas.fill(line((9, 16), (14, 16), width=1) | line((16, 20), (23, 20), width=1), _RIPPLE)
    return canvas


def _draw_hole(canvas: Canvas) -> None:
    hole = polygon((4, 13), (9, 7), (16, 5.5), (22, 7), (28, 12), (29, 18), (25, 25), (17, 28), (9, 26), (4, 21))
    canvas.fill(grown(hole, 1.5), "#8fbfd8")
    canvas.fill(grown(hole, 1), _SNOW)
    canvas.fill(hole, _DEEP)
    canvas.fill(hole & disc(17, 19, 12.5, height=10.5), _WATER)


def _goal() -> Canvas:
    canvas = _ice()
    _draw_flag(canvas, 10, 15)
    return canvas


def _draw_flag(canvas: Canvas, x: float, width: float) -> None:
    mound = disc(x + 1, 27, 8, height=3)
    tip = x + width
    flag = polygon((x, 4.5), (tip, 5.5), (tip - 3, 10), (tip, 14.5), (x, 15.5))
    pole = line((x, 3.5), (x, 27), width=2)
    canvas.fill(grown(mound, 1), "#8fbfd8")
    canvas.fill(mound, _SNOW)
    canvas.fill(grown(flag | pole, 1), INK)
    canvas.fill(flag, _FLAG)
    canvas.fill(pole, _POLE)


def _player() -> Canvas:
    canvas = _ice()
    _draw_player(canvas, 16, ((9, 25.5), (23, 25.5)))
    return canvas


def _player_in_hole() -> Canvas:
    canvas = _hole()
    _draw_player(canvas, 16.5, ((6.5, 14), (26.5, 14)), is_well=False)
    canvas.lay(_hole(), rectangle(0, 21.5, PIXELS, PIXELS))
    canvas.fill(line((10, 22), (23, 22), width=1) | line((12.5, 24.5), (20.5, 24.5), width=1), _RIPPLE)
    return canvas


def _player_on_goal() -> Canvas:
    canvas = _ice()
    _draw_flag(canvas, 20.5, 10)
    _draw_player(canvas, 10, ((3, 8), (20, 17.5)))
    return canvas


def _draw_player(
    canvas: Canvas, x: float, hands: tuple[tuple[float, float], tuple[float, float]], *, is_well: bool = True
) -> None:
    y = 14.5
    knit = disc(x, y - 2, 6.8, height=6.6) & rectangle(0, 0, PIXELS, y - 2)
    band = rectangle(x - 7.2, y - 3.6, x + 7.2, y - 0.8, radius=1.3)
    bobble = disc(x, y - 9, 2.2)
    draw_person(canvas, x, y, coat=_COAT, cap=knit | band | bobble, hands=hands, is_well=is_well)
    canvas.fill(knit, _CAP)
    canvas.fill(band | bobble, _SNOW)
