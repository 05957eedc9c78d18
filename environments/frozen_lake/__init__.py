"""Frozen lake: walk over the ice from the start to the goal without falling into a hole.

Observation  the map as text: ``P`` player, ``_`` ice, ``O`` hole, ``G`` goal, ``X`` player in a hole, ``√`` player on
             the goal; the rules precede the first map, and a notice precedes the map after an unreadable answer. As a
             grid: the indices of the symbols in ``_OGPX√``
Actions      ``up`` ``down`` ``left`` ``right`` as ``<answer>up</answer>``; an unreadable answer, or a move against the
             edge, leaves the player in place and costs a move. As an index: 0 to 3 in that order
Reward       1.0 on reaching the goal, otherwise 0.0; minus `format_penalty` for an unreadable answer
Ends         terminated on goal or hole; truncated after `max_moves`
Levels       start and goal are anywhere; every other cell is a hole with chance 1 - `frozen`. A lake is redrawn until
             the goal is reachable within `max_moves`. With the default options, the shortest path has 1 to 10 moves
             (median 3). The option `map` sets a fixed lake instead
Randomness   after a reset with seed s, ``chance(s, t)`` decides whether move t slips; it is the same in every process
Options      see `LakeOptions`
Info         ``action_is_valid`` (the answer is readable), ``action_is_effective`` (the player moved), ``success``,
             ``legal_moves``; at reset also ``level``: ``{"shortest": moves}``
"""

from __future__ import annotations

from .expert import FrozenLakeExpert
from .game import FrozenLake, FrozenLakeVector, LakeGame, LakeOptions
from .lakes import MAPS, Lake, draw_lake, read_map

__all__ = [
    "MAPS",
    "FrozenLake",
    "FrozenLakeExpert",
    "FrozenLakeVector",
    "Lake",
    "LakeGame",
    "LakeOptions",
    "draw_lake",
    "read_map",
]
