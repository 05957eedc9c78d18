"""Frozen lake: walk over the ice from where you stand to the goal, and do not fall into a hole.

Observation  the map as text: ``P`` player, ``_`` ice, ``O`` hole, ``G`` goal, ``X`` player in a hole, ``√`` player on
             the goal; the rules stand above the first one, a notice above one that follows an unreadable answer
Actions      ``up`` ``down`` ``left`` ``right`` as ``<answer>up</answer>``; anything else leaves the player where it is
             and costs a move, as does walking against the edge
Reward       1.0 on reaching the goal, otherwise 0.0; `format_penalty` less when the answer could not be read
Ends         terminated on goal or hole; truncated after `max_moves`
Levels       start and goal anywhere, every other cell a hole with chance 1 - `frozen`, drawn until the goal can be
             reached within `max_moves`. At the defaults the shortest path has 1 to 10 moves, median 3.
Options      see `LakeOptions`
Info         ``action_is_valid`` (an answer was read), ``action_is_effective`` (the player moved), ``success``,
             ``legal_moves``; at reset also ``level``: ``{"shortest": moves}``
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import Any, NamedTuple

import gymnasium

from envkit.environments.answer import parse_answer
from envkit.environments.board import MOVES, UNREADABLE, find_board
from envkit.environments.options import check_boolean, check_choice, check_integer, check_number, override
from envkit.environments.split import SPLITS, Split, split_of
from envkit.errors import OptionError, StepOrderError
from envkit.spaces import Utf8Text
from envkit.types import JSON, Info, Observation, stable_hash

_MAPS = 20_000
_CELLS = 2_000_000
"""Bounds on the search for a level: maps drawn, and cells in them."""
_SIDES = {"up": ("left", "right"), "down": ("left", "right"), "left": ("up", "down"), "right": ("up", "down")}
_FREE = str.maketrans({"_": "1", "G": "1", "P": "1", "O": "0", "\n": "0"})

_RULES = """\
You are on a frozen lake. Walk to the goal and do not fall into a hole.
On the map, P is you, _ is ice, O is a hole and G is the goal. X means that you fell into a hole, √ that you reached \
the goal.
The moves are up, down, left and right, each one cell; the edge of the map stops you.{slip}
You have {max_moves} moves. Answer with one move, like this: <answer>up</answer>"""
_SLIP = " The ice is slippery: with chance {slip:g} you go to one of the two sides of your move instead."


@dataclass(frozen=True, slots=True, kw_only=True)
class LakeOptions:
    """What can be changed about the lake.

    Attributes:
        size: Cells along one side, 2 to 32.
        frozen: Chance in [0, 1] that a cell other than start and goal is ice.
        slip: Chance in [0, 1] that a move goes to one of its two sides instead, each side equally likely.
        max_moves: Moves until the episode is truncated, 1 to 10,000; None means 10 up to size 4 and five eighths of
            the number of cells beyond.
        split: Draw only levels of this split ("train", "validation" or "eval"); None draws any.
        instructions: Whether observations carry rules and notices, or only the map.
        format_penalty: What is subtracted from the reward when an answer cannot be read, 0 to 100.
    """

    size: int = 4
    frozen: float = 0.8
    slip: float = 0.0
    max_moves: int | None = None
    split: Split | None = None
    instructions: bool = True
    format_penalty: float = 0.0

    def __post_init__(self) -> None:
        check_integer("size", self.size, low=2, high=32)
        check_number("frozen", self.frozen, low=0, high=1)
        check_number("slip", self.slip, low=0, high=1)
        if self.max_moves is not None:
            check_integer("max_moves", self.max_moves, low=1, high=10_000)
        if self.split is not None:
            check_choice("split", self.split, SPLITS)
        check_boolean("instructions", self.instructions)
        check_number("format_penalty", self.format_penalty, low=0, high=100)

    @property
    def move_limit(self) -> int:
        """Moves until the episode is truncated."""
        return max(10, self.size * self.size * 5 // 8) if self.max_moves is None else self.max_moves


class Lake(NamedTuple):
    """A level.

    Attributes:
        ice: The map without the player.
        start: Cell that the player starts on.
        shortest: Moves on a shortest path to the goal.
    """

    ice: str
    start: int
    shortest: int


def draw_lake(seed: int, options: LakeOptions) -> Lake:
    """Return the level of `seed`: the same in every process, whatever the slip, rules and penalty.

    Raises:
        OptionError: No level that these options ask for was found.
    """
    return _draw_lake(seed, options.size, float(options.frozen), options.move_limit, options.split)


@lru_cache(maxsize=4096)
def _draw_lake(seed: int, size: int, frozen: float, move_limit: int, split: Split | None) -> Lake:
    rng = Random(stable_hash("FrozenLake", seed, size, frozen))
    chance = rng.random  # the one method whose numbers Python promises to keep
    cells = size * size
    for _ in range(min(_MAPS, _CELLS // cells)):
        start = int(chance() * cells)
        goal = (start + 1 + int(chance() * (cells - 1))) % cells
        tiles = ["_" if chance() < frozen else "O" for _ in range(cells)]
        tiles[start] = "_"
        tiles[goal] = "G"
        ice = "\n".join("".join(tiles[row : row + size]) for row in range(0, cells, size))
        start += start // size  # from a cell's number to its place in the text
        board = put(ice, start, "P")
        shortest = len(_layers(board))
        if 0 < shortest <= move_limit and (split is None or split_of(board) == split):
            return Lake(ice, start, shortest)
    raise OptionError(
        "size" if split is None else "split",
        f"found no lake with size={size}, frozen={frozen}, split={split} that can be crossed in {move_limit} moves",
    )


def put(board: str, cell: int, symbol: str) -> str:
    """Return `board` with `symbol` on `cell`."""
    return board[:cell] + symbol + board[cell + 1 :]


def walk(ice: str, cell: int, move: str | None, *, slip: float, chance: float) -> int:
    """Return the cell that the player is on after `move` from `cell`.

    Args:
        ice: The map without the player.
        cell: Where the player is.
        move: What was answered; None stays.
        slip: Chance that the move goes to a side.
        chance: Number in [0, 1) that decides it: below half of `slip` one side, below `slip` the other.
    """
    if move is None:
        return cell
    if chance < slip:
        move = _SIDES[move][chance * 2 < slip]
    width = ice.find("\n") + 1
    if move == "up":
        to = cell - width
    elif move == "down":
        to = cell + width
    elif move == "left":
        to = cell - 1
    else:
        to = cell + 1
    return to if 0 <= to < len(ice) and ice[to] != "\n" else cell


class FrozenLake(gymnasium.Env[str, str]):
    """The lake as an environment; keyword arguments are `LakeOptions`, which ``reset(options=...)`` overrides.

    Raises:
        OptionError: An option is unknown or its value is refused.
    """

    metadata = {  # noqa: RUF012 - Gymnasium's own declaration is an instance variable
        "render_modes": ["ansi"],
        "metrics": {"action_is_valid": "mean", "action_is_effective": "mean", "success": "last"},
    }

    def __init__(self, *, render_mode: str | None = None, **options: JSON) -> None:
        if render_mode is not None:
            check_choice("render_mode", render_mode, ["ansi"])
        self.render_mode = render_mode
        self.observation_space = Utf8Text(4096)
        self.action_space = Utf8Text(1 << 20)
        self._defaults = override(LakeOptions(), options)
        self._options = self._defaults
        self._running = False
        self._board = ""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        self._running = False
        chosen = override(self._defaults, options)
        super().reset(seed=seed)
        self._seed = int(self.np_random.integers(1 << 31)) if seed is None else int(seed)
        self._lake = draw_lake(self._seed, chosen)
        self._options = chosen
        self._cell = self._lake.start
        self._moves = 0
        self._limit = chosen.move_limit
        self._running = True
        self._board = put(self._lake.ice, self._cell, "P")
        info: Info = {"success": False, "legal_moves": list(MOVES), "level": {"shortest": self._lake.shortest}}
        return f"{_rules(chosen)}\n\n{self._board}" if chosen.instructions else self._board, info

    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        if not self._running:
            raise StepOrderError("step before reset, or after the end of the episode")
        options = self._options
        move = parse_answer(action, MOVES)
        chance = _chance(self._seed, self._moves) if options.slip else 0.0
        cell = walk(self._lake.ice, self._cell, move, slip=options.slip, chance=chance)
        moved, self._cell = cell != self._cell, cell
        self._moves += 1
        tile = self._lake.ice[cell]
        terminated = tile != "_"
        truncated = self._moves >= self._limit and not terminated
        self._running = not (terminated or truncated)
        self._board = text = put(self._lake.ice, cell, "P" if tile == "_" else "X" if tile == "O" else "√")
        reward = 1.0 if tile == "G" else 0.0
        if move is None:
            reward -= options.format_penalty
            if options.instructions:
                text = f"{UNREADABLE}\n{text}"
        info: Info = {
            "action_is_valid": move is not None,
            "action_is_effective": moved,
            "success": tile == "G",
            "legal_moves": list(MOVES),
        }
        return text, reward, terminated, truncated, info

    def render(self) -> str:
        """Return the map as it is now; empty before the first reset."""
        return self._board


class FrozenLakeExpert:
    """Knows the shortest ways over a lake that it sees; plays as if nothing were slippery."""

    def __init__(self, **options: JSON) -> None:
        override(LakeOptions(), options)

    def moves(self, observation: Observation) -> Sequence[str]:
        """Return every first move of a shortest path; empty after the end or when there is no path."""
        board = find_board(observation.text)
        layers = _layers(board)
        if not layers:
            return ()
        width = board.find("\n") + 1
        here = 1 << (len(board) - 1 - board.find("P"))
        around = (here << width, here >> width, here << 1, here >> 1)
        return [move for move, cell in zip(MOVES, around, strict=True) if cell & layers[-1]]

    def is_tricky(self, observation: Observation) -> bool:
        """Say whether some move that brings the player nearer to the goal as the crow flies falls into a hole."""
        board = find_board(observation.text)
        here, goal, width = board.find("P"), board.find("G"), board.find("\n") + 1
        if here < 0 or goal < 0:
            return False
        down = goal // width - here // width
        right = goal % width - here % width
        return (down != 0 and board[here + (width if down > 0 else -width)] == "O") or (
            right != 0 and board[here + (1 if right > 0 else -1)] == "O"
        )

    def answer(self, move: str) -> str:
        return f"<answer>{move}</answer>"


def _layers(board: str) -> list[int]:
    """Return the cells at distance 0, 1, ... from the goal, up to those next to the player; empty without a path.

    A set of cells is an integer whose lowest bit is the board's last character. Line ends are bits that are never
    free, so that shifting cannot walk around an edge.
    """
    here, goal, width = board.find("P"), board.find("G"), board.find("\n") + 1
    if here < 0 or goal < 0:
        return []
    try:
        free = int(board.translate(_FREE), 2)
    except ValueError:  # a symbol that no lake has
        return []
    player = 1 << (len(board) - 1 - here)
    layer = 1 << (len(board) - 1 - goal)
    layers = []
    while layer:
        layers.append(layer)
        free &= ~layer
        layer = (layer << 1 | layer >> 1 | layer << width | layer >> width) & free
        if layer & player:
            return layers
    return []


def _chance(seed: int, move: int) -> float:
    """Return the number in [0, 1) that decides whether move number `move` of an episode slips."""
    return (stable_hash("FrozenLake", "slip", seed, move) >> 11) / (1 << 53)


def _rules(options: LakeOptions) -> str:
    slip = _SLIP.format(slip=options.slip) if options.slip else ""
    return _RULES.format(slip=slip, max_moves=options.move_limit)
