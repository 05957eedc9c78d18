"""Sokoban: push every box onto a target. Boxes cannot be pulled, so a careless push can lose the level.

Observation  the room as text: ``#`` wall, ``_`` floor, ``O`` target, ``√`` box on a target, ``X`` box, ``P`` player,
             ``S`` player on a target. The rules precede the first room. After an unreadable answer, a notice precedes
             the room. With ``observation="grid"``, an array: the index of each cell's symbol in ``#_O√XPS``
Actions      ``up`` ``down`` ``left`` ``right`` as ``<answer>up</answer>``; walking into a box pushes it. An unreadable
             answer, or a blocked move, leaves the player in place and costs a move. With `actions_per_turn`, an answer
             may have several moves: ``<answer>up || left</answer>``. With ``action="index"``: 0 to 3 in that order
Reward       -0.1 per move, +1 for a box pushed onto a target, -1 for a box pushed off a target, +10 for the solution.
             So the last push earns 10.9. An unreadable answer costs `format_penalty`. For `reward` "sparse", see
             `SokobanOptions`
Ends         terminated when every box is on a target; truncated after `max_moves`
Levels       a random walk carves the room. A search backwards from every solved state finds the start. The shortest
             solution is thus known, and its `moves` and `pushes` are in the requested ranges. With the default options
             (6x6, one box), it has 2 to 10 moves (median 4), and the limit is 15. `level_file` sets rooms from a file
Options      see `SokobanOptions`
Info         after a step, ``action_is_valid`` (the answer is readable) and ``action_is_effective`` (something moved);
             always ``success`` and ``legal_moves``; at the reset of a random level also ``level``:
             ``{"shortest": moves, "pushes": pushes}``
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
