"""Sokoban: push every box onto a target. Boxes cannot be pulled, so a careless push can lose the level.

Observation  the room as text: ``#`` wall, ``_`` floor, ``O`` target, ``√`` box on a target, ``X`` box, ``P`` player,
             ``S`` player on a target; the rules precede the first room, and a notice precedes the room after an
             unreadable answer. As a grid: the indices of the symbols in ``#_O√XPS``
Actions      ``up`` ``down`` ``left`` ``right`` as ``<answer>up</answer>``; walking into a box pushes it. An unreadable
             answer, or a blocked move, leaves the player in place and costs a move. With `actions_per_turn`, an answer
             may have several moves: ``<answer>up || left</answer>``. As an index: 0 to 3 in that order
Reward       -0.1 per move, +1 for a box pushed onto a target, -1 for a box pushed off one, +10 for the solution (the
             last push thus earns 10.9); minus `format_penalty` for an unreadable answer. For `reward` "sparse", see
             `SokobanOptions`
Ends         terminated when every box is on a target; truncated after `max_moves`
Levels       a random walk carves the room. A search backwards from every solution finds the start, so that the shortest
             solution is known and its `moves` and `pushes` are in the requested range. With the default options (6x6,
             one box), it has 2 to 10 moves (median 4), and the limit is 15. `level_file` sets rooms from a file instead
Options      see `SokobanOptions`
Info         ``action_is_valid`` (the answer is readable), ``action_is_effective`` (something moved), ``success``,
             ``legal_moves``; at reset also ``level``: ``{"shortest": moves, "pushes": pushes}``, unless the level is
             from a file
"""

from __future__ import annotations

from .expert import SokobanExpert
from .files import read_levels
from .game import Sokoban, SokobanGame, SokobanOptions, SokobanVector
from .levels import Puzzle, draw_level
from .rules import play
from .solver import solve

__all__ = [
    "Puzzle",
    "Sokoban",
    "SokobanExpert",
    "SokobanGame",
    "SokobanOptions",
    "SokobanVector",
    "draw_level",
    "play",
    "read_levels",
    "solve",
]
