"""Sokoban: push every box onto a target. Boxes cannot be pulled, so a careless push can lose the level.

Observation  the room as text: ``#`` wall, ``_`` floor, ``O`` target, ``√`` box on a target, ``X`` box, ``P`` player,
             ``S`` player on a target; the rules stand above the first one, a notice above one that follows an
             unreadable answer. As a grid: the same as numbers, in the order of ``#_O√XPS``
Actions      ``up`` ``down`` ``left`` ``right`` as ``<answer>up</answer>``; walking into a box pushes it. Anything else
             leaves the player where it is and costs a move, as does walking or pushing against what stands there. With
             `actions_per_turn`, several: ``<answer>up || left</answer>``. As an index: 0 to 3 in that order
Reward       -0.1 a move, +1 for a box that comes onto a target, -1 for one that leaves it, +10 for the solution (so
             10.9 for the last push); `format_penalty` less when the answer could not be read. Or `reward` "sparse"
Ends         terminated when every box is on a target; truncated after `max_moves`
Levels       a room carved by a random walk, and a start drawn from a search backwards from every solution, so that the
             shortest solution is known: its `moves` and `pushes` lie where they are asked to. At the defaults (6x6,
             one box): 2 to 10 moves, median 4, within 15 moves. Or the rooms of a `level_file`
Options      see `SokobanOptions`
Info         ``action_is_valid`` (an answer was read), ``action_is_effective`` (something moved), ``success``,
             ``legal_moves``; at reset also ``level``: ``{"shortest": moves, "pushes": pushes}`` of a drawn one
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
