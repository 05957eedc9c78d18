"""The rules of Sokoban: what a move does in a room that is walled all around."""

from __future__ import annotations

from ..boards.physics import Physics

SYMBOLS = "#_O√XPS"
"""Wall, floor, target, box on a target, box, player, player on a target; their places here are their codes in grids
(those of gym-sokoban, which has no 6)."""


def _rule(ahead: str, beyond: str) -> tuple[str, str] | None:
    if ahead in "_O":
        return "P" if ahead == "_" else "S", beyond
    if ahead in "X√" and beyond in ("_", "O"):
        return "P" if ahead == "X" else "S", "X" if beyond == "_" else "√"
    return None


PHYSICS = Physics(SYMBOLS, {"P": "_", "S": "O"}, _rule, wanted="X", done="√", reach=2)


def play(board: str, move: str) -> str:
    """Return the room after `move`; the very same text when something stands in the way."""
    return PHYSICS.play(board, move)
