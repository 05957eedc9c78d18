"""Pictures of boards: frames made of tiles, and coloured text for a terminal. A tile is the picture of a cell."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from itertools import groupby
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_RESET = "\x1b[0m"


@cache
def read_tiles(file: Path) -> NDArray[np.uint8]:
    """Return the tiles in a file of ``np.save``: one for each code, P by P pixels, of shape (codes, P, P, 3)."""
    tiles: NDArray[np.uint8] = np.load(file)
    tiles.flags.writeable = False
    return tiles


def paint(codes: NDArray[np.uint8], tiles: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return pictures (..., rows * P, columns * P, 3) of boards of codes (..., rows, columns).

    `tiles` are the pictures of the codes, of P by P pixels. Raises `IndexError` if a code has no tile.
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
    """Return a board in the game's own symbols as coloured text for a terminal; every line ends in the default colours.

    `styles` are parameters of an SGR sequence (ECMA-48) such as ``1;33`` by symbol; `shown` is what to show for a
    symbol. Symbols without an entry are plain, and shown unchanged.
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
