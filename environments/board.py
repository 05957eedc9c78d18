"""Boards: square maps as text, one character per cell, lines joined by line ends.

A cell is identified by its index in that text: its neighbours are 1 and `size` + 1 characters away, and drawing
replaces characters.
"""

from __future__ import annotations

MOVES: tuple[str, ...] = ("up", "down", "left", "right")
"""The moves of every board environment."""

UNREADABLE = "Your answer could not be read: write one of up, down, left, right, such as <answer>up</answer>."
"""The notice above the board after an answer without a move."""
UNREADABLE_TURN = (
    "Your answer could not be read: write up, down, left or right, joined by ||, such as <answer>up || left</answer>."
)
"""The same notice, for answers that may hold several moves."""


def steps_of(width: int) -> dict[str, int]:
    """Return the change of the cell index per move, for lines of `width` characters including their line ends."""
    return dict(zip(MOVES, (-width, width, -1, 1), strict=True))


def spread_out(board: str) -> str:
    """Return `board` with a space between the symbols of a line, so that a BPE tokenizer does not merge them."""
    return "\n".join([" ".join(line) for line in board.split("\n")])


def find_board(text: str, *, spaced: bool = False) -> str:
    """Return the board at the end of an observation, without spaces; empty if the observation does not end in a square.

    Rules or a notice may stand above it; the length of the last line gives the number of lines of the board.

    Args:
        text: The observation.
        spaced: Whether there is a space between the symbols of a line; see `spread_out`.
    """
    text = text.rstrip()
    if spaced:
        width = len(text) - text.rfind("\n")
        board = text[max(0, len(text) - width * width // 2 + 1) :]
        close = "\n".join([line[::2] for line in board.split("\n")])
        return close if close == find_board(close) and spread_out(close) == board and width % 2 == 0 else ""
    size = len(text) - text.rfind("\n") - 1
    board = text[max(0, len(text) - size * (size + 1) + 1) :]
    squared = board[size :: size + 1] == "\n" * (size - 1) and board.count("\n") == size - 1
    return board if squared and len(board) == size * (size + 1) - 1 else ""
