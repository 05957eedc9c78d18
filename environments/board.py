"""Boards: square maps as text, with one character per cell and a newline between rows.

A cell is identified by the index of its character in the text. On a board with `size` rows, the neighbours of a cell
are 1 (left, right) and `size` + 1 (up, down) characters away.
"""

from __future__ import annotations

MOVES: tuple[str, ...] = ("up", "down", "left", "right")
"""The moves of every board environment."""

UNREADABLE = "Your answer could not be read: write one of up, down, left, right, such as <answer>up</answer>."
"""The notice above the board after an answer without a move."""
UNREADABLE_TURN = (
    "Your answer could not be read: write up, down, left or right, joined by ||, such as <answer>up || left</answer>."
)
"""The same notice, for answers that may contain several moves."""


def steps_of(width: int) -> dict[str, int]:
    """Return by how much each move changes the cell index. A line has `width` characters, including the newline."""
    return dict(zip(MOVES, (-width, width, -1, 1), strict=True))


def spread_out(board: str) -> str:
    """Return `board` with a space between the symbols of a line, so that a BPE tokenizer does not merge them."""
    return "\n".join([" ".join(line) for line in board.split("\n")])


def find_board(text: str, *, spaced: bool = False) -> str:
    """Return the board at the end of an observation, without spaces; an empty string if no board is there.

    Rules or a notice may precede the board. A board has as many lines as its last line has cells.

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
