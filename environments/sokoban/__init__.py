"""Sokoban: push every box onto a target. Boxes cannot be pulled, so a careless push can lose the level.

Observation  the room as text: ``#`` wall, ``_`` floor, ``O`` target, ``√`` box on a target, ``X`` box, ``P`` player,
             ``S`` player on a target; the rules are above the first room, a notice above the room after an unreadable
             answer. As a grid: the same as numbers, in the order of ``#_O√XPS``
Actions      ``up`` ``down`` ``left`` ``right`` as ``<answer>up</answer>``; walking into a box pushes it. Anything else,
             and walking or pushing against an obstacle, leaves the player in place and costs a move. With
             `actions_per_turn`, several: ``<answer>up || left</answer>``. As an index: 0 to 3 in that order
Reward       -0.1 per move, +1 for a box pushed onto a target, -1 for a box pushed off one, +10 for the solution (so
             10.9 for the last push); minus `format_penalty` for an unreadable answer. Or `reward` "sparse"
Ends         terminated when every box is on a target; truncated after `max_moves`
Levels       a room carved by a random walk, and a start drawn by a search backwards from every solution, so that the
             shortest solution is known and its `moves` and `pushes` are in the requested range. At the defaults (6x6,
             one box): 2 to 10 moves, median 4, within 15 moves. Or the rooms of a `level_file`
Options      see `SokobanOptions`
Info         ``action_is_valid`` (the answer is readable), ``action_is_effective`` (something moved), ``success``,
             ``legal_moves``; at reset also ``level``: ``{"shortest": moves, "pushes": pushes}`` of a drawn level
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
