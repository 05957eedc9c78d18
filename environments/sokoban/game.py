"""Sokoban as a game; the docstring of the package describes the environment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar, Literal

from envkit.errors import OptionError

from ..boards.env import BoardEnv
from ..boards.game import BoardGame, BoardOptions, Level, Rewards
from ..boards.vector import BoardVectorEnv
from ..options import check_choice, check_integer, check_path, check_range
from .files import read_levels
from .levels import draw_level
from .rules import PHYSICS, SYMBOLS

_RULES = """\
You are the player in a Sokoban room. Push every box onto a target.
In the room, {P} is you, {S} is you on a target, {wall} is a wall, {_} is floor, {X} is a box, {O} is a target and {√} \
is a box on a target.
The moves are up, down, left and right, each one cell. Walking into a box pushes it if the cell behind it is free; \
boxes cannot be pulled.
You have {max_moves} moves. {how}"""
_FILE_MOVES = 120
"""Move limit in a room from a file, as in gym-sokoban."""
_STYLES = {
    "#": "38;5;250;48;5;240",
    "_": "38;5;137;48;5;230",
    "O": "1;38;5;25;48;5;230",
    "√": "1;38;5;231;48;5;29",
    "X": "1;38;5;16;48;5;214",
    "P": "1;38;5;231;48;5;125",
    "S": "1;4;38;5;231;48;5;25",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SokobanOptions(BoardOptions):
    """Options of Sokoban.

    Attributes:
        size: Cells along one side, including the walls, 5 to 15; None means 6, or the size of the rooms in
            `level_file`.
        boxes: Number of boxes, 1 to 4, which is also the number of targets. None means 1, or the number in the rooms of
            `level_file`.
        moves: Minimum and maximum moves of a level's shortest solution, such as [8, 12]. None means 2 to
            `size` * `boxes` * 5 / 3, which is 10 for 6x6 with one box.
        pushes: Minimum and maximum pushes of the shortest solution. If several solutions are shortest, the one with the
            fewest pushes counts. None accepts any number.
        level_file: A text file with rooms in the format of Boxoban, or a folder of such files. They replace the random
            rooms. Only `make` and `register` accept this option: a client must not read the files of a server.
        reward: "dense" gives the rewards of gym-sokoban. "sparse" gives 1 for the solution, or the share of boxes on
            targets when the moves run out.
        max_moves: Moves until the episode is truncated. None means 120 in rooms from a file. In random rooms, None
            means the larger of `size` * `boxes` * 5 / 2 (15 for 6x6 with one box) and 1.5 times the maximum of `moves`.
    """

    canonical: ClassVar[str] = SYMBOLS
    for_make: ClassVar[frozenset[str]] = frozenset({"level_file"})

    size: int | None = None
    boxes: int | None = None
    moves: Sequence[int] | None = None
    pushes: Sequence[int] | None = None
    level_file: str | None = None
    reward: Literal["dense", "sparse"] = "dense"

    def __post_init__(self) -> None:
        if self.size is not None:
            check_integer("size", self.size, low=5, high=15)
        if self.boxes is not None:
            check_integer("boxes", self.boxes, low=1, high=4)
        check_choice("reward", self.reward, ("dense", "sparse"))
        BoardOptions.__post_init__(self)  # super() fails here, because `dataclass(slots=True)` creates a new class
        if self.level_file is not None:
            if self.size not in (None, self.side):
                raise OptionError("size", f"is {self.size}, but {self.level_file} has size {self.side}; leave size out")
            for name in ("boxes", "moves", "pushes", "split", "num_levels"):
                if getattr(self, name) is not None:
                    problem = f"applies to random levels, but level_file is set ({len(self.rooms)} levels)"
                    raise OptionError(name, problem)
            return
        if self.moves is not None:
            check_range("moves", self.moves, low=1, high=500)
            if self.max_moves is not None and self.moves[1] > self.max_moves:
                fitting = [min(self.moves[0], self.max_moves), self.max_moves]
                raise OptionError(
                    "moves",
                    f"go up to {self.moves[1]}, above max_moves ({self.max_moves}); "
                    f"set moves={fitting}, or max_moves to at least {self.moves[1]}",
                )
        if self.pushes is not None:
            check_range("pushes", self.pushes, low=1, high=self.solution[1])

    @property
    def rooms(self) -> Sequence[str]:
        """The rooms of `level_file`; empty without one."""
        if self.level_file is None:
            return ()
        check_path("level_file", self.level_file)
        return read_levels(self.level_file)

    @property
    def side(self) -> int:
        if self.level_file is not None:
            return self.rooms[0].find("\n")
        return 6 if self.size is None else self.size

    @property
    def box_count(self) -> int:
        """Number of boxes in a random level."""
        return 1 if self.boxes is None else self.boxes

    @property
    def move_limit(self) -> int:
        if self.max_moves is not None:
            return self.max_moves
        if self.level_file is not None:
            return _FILE_MOVES
        limit = self.side * self.box_count * 5 // 2
        return limit if self.moves is None else max(limit, self.moves[1] * 3 // 2)

    @property
    def solution(self) -> tuple[int, int]:
        """Minimum and maximum moves of a random level's shortest solution."""
        if self.moves is not None:
            return self.moves[0], self.moves[1]
        most = min(self.move_limit, self.side * self.box_count * 5 // 3)
        return min(2, most), most


class SokobanGame(BoardGame[SokobanOptions]):
    """Sokoban as a `BoardGame`. The object holds no state of an episode."""

    physics = PHYSICS
    tiles = Path(__file__).with_name("tiles.npy")
    styles = _STYLES
    defaults = SokobanOptions()

    def rules(self, options: SokobanOptions) -> str:
        shown = options.shown
        wall = shown.pop("#")
        return _RULES.format(wall=wall, max_moves=options.move_limit, how=options.how_to_answer, **shown)

    def draw(self, seed: int, options: SokobanOptions) -> Level:
        if options.level_file is not None:
            return Level(options.rooms[seed], {})
        pushes = None if options.pushes is None else (options.pushes[0], options.pushes[1])
        level = draw_level(seed, options.side, options.box_count, options.solution, pushes, options.split)
        return Level(level.board, {"shortest": level.moves, "pushes": level.pushes})

    def num_levels(self, options: SokobanOptions) -> int | None:
        return options.num_levels if options.level_file is None else len(options.rooms)

    def rewards(self, options: SokobanOptions) -> Rewards:
        if options.reward == "sparse":
            return Rewards(won=1.0, unfinished=1.0)
        return Rewards(move=-0.1, progress=1.0, won=10.0)


class Sokoban(BoardEnv):
    """Sokoban as an environment."""

    game = SokobanGame()
    options = asdict(game.defaults)


class SokobanVector(BoardVectorEnv):
    """Many Sokoban rooms as one vector environment, stepped in NumPy."""

    game = Sokoban.game
