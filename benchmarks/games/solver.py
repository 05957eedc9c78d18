"""A Sokoban solver independent of envkit's: breadth-first search from the start, one move at a time."""

from __future__ import annotations

from collections.abc import Iterator


class TooLargeError(Exception):
    """The search exceeded its limit on the number of states."""


def shortest_solution(board: str, *, max_states: int = 300_000) -> int | None:
    """Return the number of moves of a shortest solution; None if the board is unsolvable.

    Raises:
        TooLargeError: The search exceeded `max_states` states.
    """
    cells = {place for place, symbol in enumerate(board) if symbol not in "#\n"}
    targets = frozenset(place for place in cells if board[place] in "O√S")
    boxes = frozenset(place for place in cells if board[place] in "X√")
    [player] = (place for place in cells if board[place] in "PS")
    steps = (1, -1, board.find("\n") + 1, -board.find("\n") - 1)

    def followers(player: int, boxes: frozenset[int]) -> Iterator[tuple[int, frozenset[int]]]:
        for step in steps:
            at, past = player + step, player + 2 * step
            if at in boxes:
                if past in cells and past not in boxes:
                    yield at, boxes ^ {at, past}
            elif at in cells:
                yield at, boxes

    layer = {(player, boxes)}
    seen = set(layer)
    moves = 0
    while layer:
        if any(boxes == targets for _, boxes in layer):
            return moves
        if len(seen) > max_states:
            raise TooLargeError
        layer = {state for before in layer for state in followers(*before)} - seen
        seen |= layer
        moves += 1
    return None
