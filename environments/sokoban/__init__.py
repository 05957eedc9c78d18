"""Sokoban: push every box onto a target. Boxes cannot be pulled, so a careless push can lose the level.

Observation  the room as text: ``#`` wall, ``_`` floor, ``O`` target, ``X`` box, ``√`` box on a target, ``P`` player,
             ``S`` player on a target; the rules stand above the first one, a notice above one that follows an
             unreadable answer
Actions      ``up`` ``down`` ``left`` ``right`` as ``<answer>up</answer>``; walking into a box pushes it. Anything else
             leaves the player where it is and costs a move, as does walking or pushing against what stands there
Reward       -0.1 a move, +1 for a box that comes onto a target, -1 for one that leaves it, +10 for the solution (so
             10.9 for the last push); `format_penalty` less when the answer could not be read
Ends         terminated when every box is on a target; truncated after `max_moves`
Levels       a room carved by a random walk, and a start drawn from a search backwards from every solution, so that the
             length of the shortest solution is known and lies between `min_solution` and `max_solution`. At the
             defaults (6x6, one box): 2 to 10 moves, median 4, within 15 moves.
Options      see `SokobanOptions`
Info         ``action_is_valid`` (an answer was read), ``action_is_effective`` (something moved), ``success``,
             ``legal_moves``; at reset also ``level``: ``{"shortest": moves}``
"""

from __future__ import annotations

from envkit.environments.sokoban.expert import SokobanExpert
from envkit.environments.sokoban.levels import Level, draw_level
from envkit.environments.sokoban.rules import play
from envkit.environments.sokoban.world import Sokoban, SokobanOptions

__all__ = ["Level", "Sokoban", "SokobanExpert", "SokobanOptions", "draw_level", "play"]
