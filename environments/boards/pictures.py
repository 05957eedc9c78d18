"""Pictures of boards: tiles, frames made of tiles, and coloured text for a terminal.

A tile is the picture of a cell. It is drawn with masks: a mask marks the part of the tile that a shape covers.
Coordinates and lengths are in pixels of the finished tile, and may be fractions. The origin is the top left corner; x
points right and y down. Masks have a higher resolution than the tile: several samples per pixel. `Canvas.pixels`
averages the samples of each pixel, which smooths the edges.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import groupby, pairwise

import numpy as np
from numpy.typing import NDArray

PIXELS = 32
"""Pixels along one side of a tile."""
_FINE = 4
"""Samples along one side of a pixel."""
_SIDE = PIXELS * _FINE
INK = "#26221f"
"""Colour of outlines."""
_RESET = "\x1b[0m"
_SKIN = "#f6cfa6"

Mask = NDArray[np.bool_]
"""The samples of a tile that a shape covers. Masks are combined with ``&``, ``|`` and ``~``."""


def paint(codes: NDArray[np.uint8], tiles: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return pictures of boards.

    Args:
        codes: The code of each cell, of shape (..., rows, columns).
        tiles: The picture of each code, P by P pixels, of shape (codes, P, P, 3).

    Returns:
        The red, green and blue values, of shape (..., rows * P, columns * P, 3).

    Raises:
        IndexError: A code has no tile.
    """
    *batch, rows, columns = codes.shape
    count, pixels = tiles.shape[:2]
    # Copy the tiles line by line: each line of pixels goes directly to its place in the picture.
    lines = np.ascontiguousarray(tiles.transpose(1, 0, 2, 3)).reshape(pixels * count, pixels * 3)
    if codes.size and codes.max() >= count:
        raise IndexError(f"a cell has code {codes.max()}, but there are only {count} tiles")
    at = codes[..., :, None, :] + (np.arange(pixels) * count)[:, None]
    frames: NDArray[np.uint8] = lines.take(at, axis=0).reshape(*batch, rows * pixels, columns * pixels, 3)
    return frames


def colour(board: str, styles: Mapping[str, str], shown: Mapping[str, str]) -> str:
    """Return a board as coloured text for a terminal.

    Escape sequences are the only difference from plain text. Every line ends in the terminal's default colours.

    Args:
        board: The board, in the game's own symbols.
        styles: The style of a symbol, as parameters of an SGR sequence (ECMA-48) such as ``1;33``. Symbols without a
            style are plain.
        shown: The character to show for a symbol. Symbols without an entry are shown unchanged.
    """
    return "\n".join([_colour_line(line, styles, shown) for line in board.split("\n")])


def _colour_line(line: str, styles: Mapping[str, str], shown: Mapping[str, str]) -> str:
    parts: list[str] = []
    style = ""
    for style, run in groupby(line, lambda symbol: styles.get(symbol, "")):
        # Reset before each style, since a style need not override everything that the previous one set.
        parts.append(f"\x1b[0;{style}m" if style else _RESET if parts else "")
        parts.extend([shown.get(symbol, symbol) for symbol in run])
    return "".join(parts) + (_RESET if style else "")


class Canvas:
    """A drawing surface for one tile, filled with the colour `ground` at the start."""

    def __init__(self, ground: str) -> None:
        self._samples = np.empty((_SIDE, _SIDE, 3), np.float32)
        self._samples[:] = _rgb(ground)

    def fill(self, mask: Mask, colour: str, opacity: float = 1.0) -> None:
        """Fill the area of `mask` with `colour`, such as ``"#e69f00"``; `opacity` in [0, 1]."""
        self._samples[mask] += (_rgb(colour) - self._samples[mask]) * np.float32(opacity)

    def lay(self, above: Canvas, mask: Mask) -> None:
        """Copy the area of `mask` from the canvas `above` to this canvas."""
        self._samples[mask] = above._samples[mask]

    def pixels(self) -> NDArray[np.uint8]:
        """Return the tile, of shape (PIXELS, PIXELS, 3)."""
        blocks = self._samples.reshape(PIXELS, _FINE, PIXELS, _FINE, 3)
        tile: NDArray[np.uint8] = np.rint(blocks.mean(axis=(1, 3))).astype(np.uint8)
        return tile


def rectangle(left: float, top: float, right: float, bottom: float, *, radius: float = 0.0) -> Mask:
    """Return a rectangle with corners rounded by `radius`."""
    x, y = _grid()
    # Distance to the inner rectangle, which is smaller by `radius` on each side.
    beside = np.maximum(np.maximum(left + radius - x, x - right + radius), 0)
    above = np.maximum(np.maximum(top + radius - y, y - bottom + radius), 0)
    inside: Mask = (left <= x) & (x < right) & (top <= y) & (y < bottom)
    return inside & (beside**2 + above**2 <= radius**2) if radius else inside


def disc(x: float, y: float, radius: float, *, height: float | None = None) -> Mask:
    """Return a disc, or an ellipse with half-width `radius` and half-height `height`."""
    across, down = _grid()
    mask: Mask = ((across - x) / radius) ** 2 + ((down - y) / (radius if height is None else height)) ** 2 <= 1
    return mask


def ring(x: float, y: float, radius: float, width: float) -> Mask:
    """Return a ring of `width` inside the circle of `radius`."""
    return disc(x, y, radius) & ~disc(x, y, radius - width)


def polygon(*corners: tuple[float, float]) -> Mask:
    """Return a polygon, filled by the even-odd rule."""
    x, y = _grid()
    inside = np.zeros((_SIDE, _SIDE), np.bool_)
    for (from_x, from_y), (to_x, to_y) in zip(corners, corners[1:] + corners[:1], strict=True):
        if from_y != to_y:
            border = from_x + (y - from_y) * ((to_x - from_x) / (to_y - from_y))
            inside ^= ((from_y <= y) != (to_y <= y)) & (x < border)
    return inside


def line(*points: tuple[float, float], width: float) -> Mask:
    """Return a line through `points` with round ends and bends."""
    x, y = _grid()
    near = np.zeros((_SIDE, _SIDE), np.bool_)
    for (from_x, from_y), (to_x, to_y) in pairwise(points):
        along_x, along_y = to_x - from_x, to_y - from_y
        share = ((x - from_x) * along_x + (y - from_y) * along_y) / (along_x**2 + along_y**2)
        share = np.clip(share, 0, 1)
        near |= (x - from_x - share * along_x) ** 2 + (y - from_y - share * along_y) ** 2 <= width**2 / 4
    return near


def grown(mask: Mask, by: float) -> Mask:
    """Return `mask` grown by `by` pixels in all directions, rounded to a quarter of a pixel."""
    reach = round(by * _FINE)
    padded = np.pad(mask, reach)
    wide = np.zeros_like(mask)
    for down in range(-reach, reach + 1):
        for right in range(-reach, reach + 1):
            if down**2 + right**2 <= reach**2:
                wide |= padded[reach + down : reach + down + _SIDE, reach + right : reach + right + _SIDE]
    return wide


def stacked(canvases: Sequence[Canvas]) -> NDArray[np.uint8]:
    """Return finished tiles in the order of their codes, as a read-only array (codes, PIXELS, PIXELS, 3)."""
    tiles = np.stack([canvas.pixels() for canvas in canvases])
    tiles.flags.writeable = False
    return tiles


@cache
def _grid() -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the coordinates in pixels of the centres of a tile's samples: x [1, _SIDE] and y [_SIDE, 1]."""
    centres = ((np.arange(_SIDE) + 0.5) / _FINE).astype(np.float32)
    return centres[None, :], centres[:, None]


def _rgb(colour: str) -> NDArray[np.float32]:
    return np.array([int(colour[start : start + 2], 16) for start in (1, 3, 5)], np.float32)


def draw_person(
    canvas: Canvas,
    x: float,
    y: float,
    *,
    coat: str,
    cap: Mask,
    hands: Sequence[tuple[float, float]],
    is_well: bool = True,
) -> None:
    """Draw the player, seen from the front.

    Args:
        canvas: The canvas to draw on.
        x: Centre of the face.
        y: Centre of the face; the feet are 15 pixels lower.
        coat: Colour of the clothes.
        cap: Shape of the cap. Only its outline is drawn here; the caller fills it.
        hands: Positions (x, y) of the two hands; the hand further left in the picture comes first.
        is_well: Whether the player smiles. If false, the eyes are drawn as crosses.
    """
    head = disc(x, y, 6.8, height=6.4)
    body = rectangle(x - 5, y + 4, x + 5, y + 12.5, radius=2.5)
    legs = rectangle(x - 4.4, y + 10, x - 0.5, y + 15, radius=1) | rectangle(x + 0.5, y + 10, x + 4.4, y + 15, radius=1)
    sleeves, palms = np.zeros_like(head), np.zeros_like(head)
    for shoulder, hand in zip((x - 4.4, x + 4.4), hands, strict=True):
        sleeves |= line((shoulder, y + 6.5), hand, width=3.2)
        palms |= disc(*hand, 1.7)
    canvas.fill(grown(head | body | legs | cap | sleeves | palms, 1), INK)
    canvas.fill(legs, "#4b5675")
    canvas.fill(body, coat)
    canvas.fill(grown(sleeves, 0.5) & body, INK, 0.3)
    canvas.fill(sleeves, coat)
    canvas.fill(palms, _SKIN)
    canvas.fill(grown(head, 0.75) & (body | sleeves), INK, 0.6)
    canvas.fill(head, _SKIN)
    if is_well:
        eyes = disc(x - 2.6, y + 1.5, 1, height=1.4) | disc(x + 2.6, y + 1.5, 1, height=1.4)
        mouth = ring(x, y + 2.7, 2.1, 0.8) & rectangle(0, y + 3.6, PIXELS, PIXELS)
    else:
        eyes = _cross(x - 2.8, y + 0.9) | _cross(x + 2.8, y + 0.9)
        mouth = disc(x, y + 4.2, 1.2)
    canvas.fill(eyes, INK)
    canvas.fill(mouth, "#9c4a3c")
    canvas.fill(grown(cap, 0.6) & head, INK, 0.5)


def _cross(x: float, y: float) -> Mask:
    return line((x - 1.2, y - 1.2), (x + 1.2, y + 1.2), width=0.9) | line(
        (x - 1.2, y + 1.2), (x + 1.2, y - 1.2), width=0.9
    )
