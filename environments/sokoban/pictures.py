"""Pictures of cells (tiles) and terminal colours of Sokoban. Tiles differ in shape as well as in colour."""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from ..boards.pictures import INK, PIXELS, Canvas, Mask, disc, draw_person, grown, line, polygon, rectangle, stacked

STYLES = {
    "#": "38;5;250;48;5;240",
    "_": "38;5;137;48;5;230",
    "O": "1;38;5;25;48;5;230",
    "√": "1;38;5;231;48;5;29",
    "X": "1;38;5;16;48;5;214",
    "P": "1;38;5;231;48;5;125",
    "S": "1;4;38;5;231;48;5;25",
}
"""Text and background colour of each symbol. Terminal themes do not change these colours of the 256-colour palette."""

_FLOOR, _SEAM = "#eee3cd", "#e0d2b6"
_MORTAR, _BRICKS, _SHINE, _SHADE = "#39414f", ("#66748a", "#5d6a80", "#6d7b91"), "#8391a6", "#4b576b"
_MARK = "#0067a8"


@cache
def draw_tiles() -> NDArray[np.uint8]:
    """Return the pictures of the cells in the order of ``#_O√XPS``, of shape (7, PIXELS, PIXELS, 3)."""
    return stacked([_wall(), _floor(), _target(), _box_on_target(), _box(), _player(), _player_on_target()])


def _wall() -> Canvas:
    canvas = Canvas(_MORTAR)
    for course in range(4):
        top = course * 8 + 0.5
        for brick, at in enumerate(range(-8 * (course % 2), PIXELS, 16)):
            left, right = at + 0.5, at + 15.5
            shade = _BRICKS[(course * 2 + brick % 2) % 3]  # half bricks at the sides continue in the neighbouring tiles
            canvas.fill(rectangle(left, top, right, top + 7, radius=1), _SHADE)
            canvas.fill(rectangle(left, top, right, top + 6, radius=1), _SHINE)
            canvas.fill(rectangle(left, top + 1, right, top + 6, radius=1), shade)
    return canvas


def _floor() -> Canvas:
    canvas = Canvas(_SEAM)
    canvas.fill(rectangle(0.5, 0.5, 31.5, 31.5, radius=1), _FLOOR)
    return canvas


def _target() -> Canvas:
    canvas = _floor()
    canvas.fill(rectangle(3, 3, 29, 29, radius=3), "#cfe4f3")
    canvas.fill(_brackets(), _MARK)
    canvas.fill(_diamond(6.5) & ~_diamond(3), _MARK)
    return canvas


def _box() -> Canvas:
    canvas = _floor()
    _draw_box(canvas, edge="#6b3e12", frame="#d98c2b", boards="#f2bd63", gap="#b26a1c")
    brace = (line((9, 23), (23, 9), width=4) | line((9, 9), (23, 23), width=4)) & rectangle(8, 8, 24, 24)
    canvas.fill(grown(brace, 0.75) & rectangle(8, 8, 24, 24), "#7d4813")
    canvas.fill(brace, "#d98c2b")
    return canvas


def _box_on_target() -> Canvas:
    canvas = _target()
    _draw_box(canvas, edge="#06402f", frame="#00825c", boards="#00a374", gap="#006d4d")
    tick = line((10.5, 16.5), (14.5, 20.5), (21.5, 11.5), width=3.4)
    canvas.fill(grown(tick, 1), "#06402f")
    canvas.fill(tick, "#ffffff")
    return canvas


def _draw_box(canvas: Canvas, *, edge: str, frame: str, boards: str, gap: str) -> None:
    canvas.fill(rectangle(4, 5, 29.5, 30, radius=3), INK, 0.25)
    canvas.fill(rectangle(3, 3, 29, 29, radius=2.5), edge)
    canvas.fill(rectangle(4.2, 4.2, 27.8, 27.8, radius=1.5), frame)
    canvas.fill(rectangle(4.2, 4.2, 27.8, 5.4, radius=0.6), "#ffffff", 0.35)
    canvas.fill(rectangle(7.2, 7.2, 24.8, 24.8), edge)
    canvas.fill(rectangle(8, 8, 24, 24), gap)
    for top in (8, 12.1, 16.2, 20.3):
        canvas.fill(rectangle(8, top, 24, top + 3.7), boards)
    for x in (5.7, 26.3):
        for y in (5.9, 26.3):
            canvas.fill(disc(x, y, 0.8), edge)


def _player() -> Canvas:
    canvas = _floor()
    _draw_player(canvas)
    return canvas


def _player_on_target() -> Canvas:
    canvas = _target()
    _draw_player(canvas)
    return canvas


def _draw_player(canvas: Canvas) -> None:
    x, y = 16, 14.5
    brim = rectangle(x - 8.2, y - 3, x + 8.2, y - 0.8, radius=1)
    ridge = rectangle(x - 1.6, y - 9.2, x + 1.6, y - 3, radius=1.2)
    dome = disc(x, y - 2, 6.8, height=6.4) & rectangle(0, 0, PIXELS, y - 2)
    draw_person(canvas, x, y, coat="#b5367a", cap=brim | ridge | dome, hands=((x - 7, y + 11), (x + 7, y + 11)))
    canvas.fill(dome, "#ffc928")
    canvas.fill(brim | ridge, "#ffe27a")
    canvas.fill(rectangle(x - 8.2, y - 3.6, x + 8.2, y - 3) & (dome | ridge), "#a97800")


def _diamond(reach: float) -> Mask:
    return polygon((16, 16 - reach), (16 + reach, 16), (16, 16 + reach), (16 - reach, 16))


def _brackets() -> Mask:
    mask = rectangle(3, 3, 29, 29, radius=3) & ~rectangle(5.4, 5.4, 26.6, 26.6, radius=1)
    return mask & ~rectangle(11, 0, 21, 32) & ~rectangle(0, 11, 32, 21)
