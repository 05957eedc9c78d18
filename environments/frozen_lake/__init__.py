"""Frozen lake: walk over the ice from where you stand to the goal, and do not fall into a hole.

Observation  the map as text: ``P`` player, ``_`` ice, ``O`` hole, ``G`` goal, ``X`` player in a hole, ``√`` player on
             the goal; the rules stand above the first one, a notice above one that follows an unreadable answer. As a
             grid: the same as numbers, in the order of ``_OGPX√``
Actions      ``up`` ``down`` ``left`` ``right`` as ``<answer>up</answer>``; anything else leaves the player where it is
             and costs a move, as does walking against the edge. As an index: 0 to 3 in that order
Reward       1.0 on reaching the goal, otherwise 0.0; `format_penalty` less when the answer could not be read
Ends         terminated on goal or hole; truncated after `max_moves`
Levels       start and goal anywhere, every other cell a hole with chance 1 - `frozen`, drawn until the goal can be
             reached within `max_moves`. At the defaults the shortest path has 1 to 10 moves, median 3. Or one `map`
Chances      move number t since the last reset with a seed, s, slips by ``chance(s, t)``: in every process alike
Options      see `LakeOptions`
Info         ``action_is_valid`` (an answer was read), ``action_is_effective`` (the player moved), ``success``,
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
