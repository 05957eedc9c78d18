"""A cache of levels as arrays. Axes: R levels, S cells of a board."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .game import BoardGame, Level


class Drawn(NamedTuple):
    """Levels as arrays.

    Attributes:
        cells_RS: Codes of the cells.
        here_R: Index of the player's cell.
        wanted_R: Number of cells that the player must still complete.
        goals_R: Number of cells that the player must complete, including those completed at the start.
        facts: `Level.facts` of the levels; each fact is an array [R].
    """

    cells_RS: NDArray[np.uint8]
    here_R: NDArray[np.int64]
    wanted_R: NDArray[np.int64]
    goals_R: NDArray[np.int64]
    facts: dict[str, NDArray[np.int64]]


class LevelCache:
    """Draws the levels of a game with given options. If they define a fixed set of levels, each level is drawn once."""

    def __init__(self, game: BoardGame[Any], options: Any) -> None:
        self._game = game
        self._options = options
        self._count = game.num_levels(options)
        self._cached: Drawn | None = None
        self._is_cached = np.zeros(0 if self._count is None else self._count, np.bool_)

    @property
    def is_single(self) -> bool:
        """Whether the options allow only one level."""
        return self._count == 1

    def draw(self, seeds: Sequence[int], spread_R: NDArray[np.uint64]) -> Drawn:
        """Return the levels of `seeds`, one row per seed. If `is_single` is true, there is one row for all seeds.

        `spread_R` is the result of `counter_rng.spread` for each seed.
        """
        if self._count is None:
            return self._encode([self._game.draw(seed, self._options) for seed in seeds])
        if self.is_single:
            return self.only()
        number_R = (spread_R % np.uint64(self._count)).astype(np.int64)
        if self._cached is None or not self._is_cached.all():
            missing = np.unique(number_R[~self._is_cached[number_R]])
            if len(missing):
                self._add(missing)
        assert self._cached is not None
        return _rows(self._cached, number_R)

    def only(self) -> Drawn:
        """Return the only level, as one row."""
        if self._cached is None:
            self._add(_ZERO)
        assert self._cached is not None
        return self._cached

    def _add(self, numbers: NDArray[np.int64]) -> None:
        drawn = self._encode([self._game.draw(int(number), self._options) for number in numbers])
        if self._cached is None:
            self._cached = _rows(drawn, np.zeros(len(self._is_cached), np.int64))
        for cached_R, drawn_R in zip(_arrays(self._cached), _arrays(drawn), strict=True):
            cached_R[numbers] = drawn_R
        self._is_cached[numbers] = True

    def _encode(self, levels: Sequence[Level]) -> Drawn:
        physics = self._game.physics
        cells_RS = physics.encode("".join([level.board for level in levels])).reshape(len(levels), -1)
        here_R = np.isin(cells_RS, physics.encode("".join(physics.players))).argmax(axis=1)
        wanted_R = (cells_RS == physics.encode(physics.wanted)).sum(axis=1)
        goals_R = wanted_R + (cells_RS == physics.encode(physics.done)).sum(axis=1)
        names = levels[0].facts
        facts = {name: np.array([level.facts[name] for level in levels], np.int64) for name in names}
        return Drawn(cells_RS, here_R, wanted_R, goals_R, facts)


_ZERO = np.zeros(1, np.int64)


def _arrays(drawn: Drawn) -> Sequence[NDArray[Any]]:
    return [drawn.cells_RS, drawn.here_R, drawn.wanted_R, drawn.goals_R, *drawn.facts.values()]


def _rows(drawn: Drawn, rows: NDArray[np.int64]) -> Drawn:
    facts = {name: part[rows] for name, part in drawn.facts.items()}
    return Drawn(drawn.cells_RS[rows], drawn.here_R[rows], drawn.wanted_R[rows], drawn.goals_R[rows], facts)
