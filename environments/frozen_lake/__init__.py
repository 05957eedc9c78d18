"""Frozen lake: walk over the ice from the start to the goal without falling into a hole.

Observation  the map as text: ``P`` player, ``_`` ice, ``O`` hole, ``G`` goal, ``X`` player in a hole, ``√`` player on
             the goal. The rules precede the first map. After an unreadable answer, a notice precedes the map. With
             ``observation="grid"``, an array instead: the index of each cell's symbol in ``_OGPX√``
Actions      ``up`` ``down`` ``left`` ``right`` as ``<answer>up</answer>``; an unreadable answer, or a move against the
             edge, leaves the player in place and costs a move. With ``action="index"``: 0 to 3 in that order
Reward       1.0 on reaching the goal, otherwise 0.0; minus `format_penalty` for an unreadable answer
Ends         terminated on goal or hole; truncated after `max_moves`
Levels       start and goal are random cells; every other cell is a hole with chance 1 - `frozen`. Lakes are drawn until
             the goal is reachable within `max_moves`. With the default options, the shortest path has 1 to 10 moves
             (median 3). The option `map` sets a fixed lake instead
Randomness   after a reset with seed s, the number ``chance(s, t)`` of `counter_rng` decides whether move t slips
Options      see `LakeOptions`
Info         after a step, ``action_is_valid`` (the answer is readable) and ``action_is_effective`` (the player moved);
             always ``success`` and ``legal_moves``; at reset also ``level``: ``{"shortest": moves}``
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
