"""The frozen lake as a game; the docstring of the package describes the environment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar

from envkit.errors import OptionError

from ..boards.env import BoardEnv
from ..boards.game import BoardGame, BoardOptions, Level, Rewards
from ..boards.physics import Physics
from ..boards.vector import BoardVectorEnv
from ..options import check_choice, check_integer, check_number
from .lakes import MAPS, SYMBOLS, Lake, draw_lake, read_map

_RULES = """\
You are on a frozen lake. Walk to the goal and do not fall into a hole.
On the map, {P} is you, {_} is ice, {O} is a hole and {G} is the goal. {X} means that you fell into a hole, {√} that \
you reached the goal.
The moves are up, down, left and right, each one cell; the edge of the map stops you.{slip}
You have {max_moves} moves. {how}"""
_SLIP = " The ice is slippery: with chance {slip:.2g} you go to one of the two sides of your move instead."
_ARRIVALS = {"_": "P", "O": "X", "G": "√"}
_STYLES = {
    "_": "38;5;67;48;5;195",
    "O": "1;38;5;195;48;5;18",
    "G": "1;38;5;16;48;5;220",
    "P": "1;38;5;231;48;5;125",
    "X": "1;38;5;231;48;5;124",
    "√": "1;38;5;231;48;5;29",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LakeOptions(BoardOptions):
    """Options of the frozen lake.

    Attributes:
        size: Cells along one side, 2 to 32; None means 4, or the size of `map`.
        frozen: Chance in [0, 1] that a cell other than start and goal is ice.
        slip: Chance in [0, 1] that the player slips to the left or right of the chosen direction, with equal chances.
        map: A fixed map instead of random ones: "4x4" or "8x8" for Gymnasium's own maps, or a list of rows in
            Gymnasium's letters, such as ["SF", "HG"]. A fixed map has no splits.
        max_moves: Moves until the episode is truncated. None means 5/8 of the number of cells, but at least 10. With
            `map`, None means 100 for sizes up to 4 and 200 for larger ones, as in Gymnasium.
    """

    canonical: ClassVar[str] = SYMBOLS

    size: int | None = None
    frozen: float = 0.8
    slip: float = 0.0
    map: str | Sequence[str] | None = None

    def __post_init__(self) -> None:
        if self.size is not None:
            check_integer("size", self.size, low=2, high=32)
        check_number("frozen", self.frozen, low=0, high=1)
        check_number("slip", self.slip, low=0, high=1)
        BoardOptions.__post_init__(self)  # super() fails here, because `dataclass(slots=True)` creates a new class
        lake = self.own_lake
        if lake is not None:
            if self.size not in (None, self.side):
                raise OptionError("size", f"is {self.size}, but the map has {self.side} rows; leave size out")
            for name in ("split", "num_levels"):
                if getattr(self, name) is not None:
                    raise OptionError(name, "applies to random lakes, not to a map")

    @property
    def own_lake(self) -> Lake | None:
        """The lake on the fixed `map`."""
        if self.map is None:
            return None
        if isinstance(self.map, str):
            check_choice("map", self.map, list(MAPS))
            return read_map(MAPS[self.map])
        if not isinstance(self.map, (list, tuple)) or not all(isinstance(row, str) for row in self.map):
            raise OptionError("map", f"must be {' or '.join(MAPS)}, or a list of rows, got {self.map!r}")
        return read_map(tuple(self.map))

    @property
    def side(self) -> int:
        if self.own_lake is not None:
            return self.own_lake.board.find("\n")
        return 4 if self.size is None else self.size

    @property
    def move_limit(self) -> int:
        if self.max_moves is not None:
            return self.max_moves
        if self.map is not None:
            return 100 if self.side <= 4 else 200
        return max(10, self.side * self.side * 5 // 8)


def _rule(ahead: str, beyond: str) -> tuple[str, str] | None:
    return (_ARRIVALS[ahead], beyond) if ahead in _ARRIVALS else None


class LakeGame(BoardGame[LakeOptions]):
    """The frozen lake as a `BoardGame`. The object holds no state of an episode."""

    physics = Physics(SYMBOLS, {"P": "_", "X": "_", "√": "_"}, _rule, wanted="G", done="√", fatal="X")
    tiles = Path(__file__).with_name("tiles.npy")
    styles = _STYLES
    defaults = LakeOptions()

    def rules(self, options: LakeOptions) -> str:
        slip = _SLIP.format(slip=options.slip) if options.slip else ""
        how = options.how_to_answer
        return _RULES.format(slip=slip, max_moves=options.move_limit, how=how, **options.shown)

    def draw(self, seed: int, options: LakeOptions) -> Level:
        lake = options.own_lake
        if lake is None:
            lake = draw_lake(seed, options.side, float(options.frozen), options.move_limit, options.split)
        return Level(lake.board, {"shortest": lake.shortest})

    def num_levels(self, options: LakeOptions) -> int | None:
        return options.num_levels if options.map is None else 1

    def rewards(self, options: LakeOptions) -> Rewards:
        return Rewards(won=1.0)

    def slip(self, options: LakeOptions) -> float:
        return options.slip


class FrozenLake(BoardEnv):
    """The frozen lake as an environment."""

    game = LakeGame()
    options = asdict(game.defaults)


class FrozenLakeVector(BoardVectorEnv):
    """Many frozen lakes as one vector environment, stepped in NumPy."""

    game = FrozenLake.game
