"""The rules of Sokoban: the effect of a move in a room enclosed by walls."""

from __future__ import annotations

from ..boards.physics import Physics

SYMBOLS = "#_O√XPS"
"""Symbols of wall, floor, target, box on a target, box, player, player on a target. The index of a symbol is its code
in grids. The codes 0 to 5 are those of gym-sokoban.
"""


def _rule(ahead: str, beyond: str) -> tuple[str, str] | None:
    if ahead in "_O":
        return "P" if ahead == "_" else "S", beyond
    if ahead in "X√" and beyond in ("_", "O"):
        return "P" if ahead == "X" else "S", "X" if beyond == "_" else "√"
    return None


PHYSICS = Physics(SYMBOLS, {"P": "_", "S": "O"}, _rule, wanted="X", done="√", reach=2)


def play(board: str, move: str) -> str:
    """Return the room after `move`. If the move is blocked, return the object `board` itself."""
    return PHYSICS.play(board, move)
