"""The rules of Sokoban, on the text of a room that is walled all around."""

from __future__ import annotations


def play(board: str, move: str) -> str:
    """Return the room after `move`; the very same text when something stands in the way."""
    here = board.find("P")
    if here < 0:
        here = board.find("S")
    if move == "left":
        step = -1
    elif move == "right":
        step = 1
    else:
        width = board.find("\n") + 1
        step = -width if move == "up" else width
    ahead = board[here + step]
    if ahead == "#":
        return board
    cells = list(board)
    if ahead in "X√":
        beyond = board[here + 2 * step]
        if beyond not in "_O":
            return board
        cells[here + 2 * step] = "X" if beyond == "_" else "√"
    cells[here + step] = "P" if ahead in "_X" else "S"
    cells[here] = "_" if board[here] == "P" else "O"
    return "".join(cells)


def reward_of(before: str, after: str) -> float:
    """Return the reward of a move that led from `before` to `after`."""
    away = after.count("X")
    return -0.1 + (before.count("X") - away) + (0 if away else 10)


def is_solved(board: str) -> bool:
    """Say whether every box is on a target."""
    return "X" not in board
