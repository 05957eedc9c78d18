"""The interface of a board game, and the options that all board games share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Generic, NamedTuple, TypeVar

from ..options import check_boolean, check_integer, check_number, check_split, check_symbols
from ..split import Split
from .physics import Physics

MANY_MOVES = "{count} moves at most, joined by ||, like this: <answer>up || left</answer>"
ONE_MOVE = "one move, like this: <answer>up</answer>"


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardOptions(ABC):
    """Options of every board game.

    Attributes:
        max_moves: Moves until the episode is truncated, 1 to 10,000; None means the game's default for the size.
        split: Draw only levels of this split ("train", "validation" or "eval"); None draws any.
        num_levels: Size of the fixed set of levels to draw from, 1 to 100,000; None draws a new level for every seed.
            On small boards, a large set may contain the same level more than once.
        instructions: Whether observations include rules and notices. If false, they contain only the board.
        symbols: The characters to show instead of those in `canonical`, in the same order; None shows `canonical`.
        spaced: Whether to put spaces between the symbols of a line; a BPE tokenizer would merge ``____`` into one
            token.
        actions_per_turn: Maximum moves per answer, 1 to 100; the moves are joined by ``||``.
        format_penalty: Amount subtracted from the reward for an unreadable answer, 0 to 100.
    """

    canonical: ClassVar[str]
    """The game's own symbols."""
    for_make: ClassVar[frozenset[str]] = frozenset()
    """Options that `reset` cannot change, because a client of an environment server must not choose them."""

    max_moves: int | None = None
    split: Split | None = None
    num_levels: int | None = None
    instructions: bool = True
    symbols: str | None = None
    spaced: bool = False
    actions_per_turn: int = 1
    format_penalty: float = 0.0

    def __post_init__(self) -> None:
        if self.max_moves is not None:
            check_integer("max_moves", self.max_moves, low=1, high=10_000)
        check_split(self.split)
        if self.num_levels is not None:
            check_integer("num_levels", self.num_levels, low=1, high=100_000)
        check_boolean("instructions", self.instructions)
        if self.symbols is not None:
            check_symbols("symbols", self.symbols, instead_of=self.canonical)
        check_boolean("spaced", self.spaced)
        check_integer("actions_per_turn", self.actions_per_turn, low=1, high=100)
        check_number("format_penalty", self.format_penalty, low=0, high=100)

    @property
    @abstractmethod
    def side(self) -> int:
        """Cells along one side of the board."""

    @property
    @abstractmethod
    def move_limit(self) -> int:
        """Moves until the episode is truncated."""

    @property
    def shown(self) -> dict[str, str]:
        """The character to show for each of the game's own symbols."""
        return dict(zip(self.canonical, self.symbols or self.canonical, strict=True))

    @property
    def how_to_answer(self) -> str:
        """The sentence at the end of the rules that explains the answer format."""
        count = self.actions_per_turn
        return f"Answer with {ONE_MOVE if count == 1 else MANY_MOVES.format(count=count)}"


OptionsT = TypeVar("OptionsT", bound=BoardOptions)


class Level(NamedTuple):
    """The start of an episode.

    Attributes:
        board: The board, in the game's own symbols.
        facts: Facts about the level, such as ``shortest`` (moves of a shortest solution); may be empty.
    """

    board: str
    facts: Mapping[str, int]


class Rewards(NamedTuple):
    """Rewards of an episode.

    Attributes:
        move: Reward of every move.
        progress: Reward for each goal that is completed. The same amount is subtracted for each goal that is undone.
        won: Reward of winning.
        unfinished: Reward when the moves run out, multiplied by the share of goals that are done.
    """

    move: float = 0.0
    progress: float = 0.0
    won: float = 1.0
    unfinished: float = 0.0


class BoardGame(ABC, Generic[OptionsT]):
    """A game on a board. The object holds no state of an episode.

    Attributes:
        physics: The effects of moves.
        tiles: File with the picture of each cell code; see `read_tiles`. Tiles differ in shape as well as in colour.
        styles: Text and background colour of each symbol in a terminal, as parameters of an SGR sequence (ECMA-48) such
            as ``1;33``. Terminal themes do not change the colours 16 to 255 of the 256-colour palette.
        defaults: The default options.
    """

    physics: ClassVar[Physics]
    tiles: ClassVar[Path]
    styles: ClassVar[Mapping[str, str]]
    defaults: OptionsT

    @abstractmethod
    def rules(self, options: OptionsT) -> str:
        """Return the rules that the player reads above the first board."""

    @abstractmethod
    def draw(self, seed: int, options: OptionsT) -> Level:
        """Return the level of `seed`, the same in every process.

        Raises:
            OptionError: No level fits the options.
        """

    @abstractmethod
    def rewards(self, options: OptionsT) -> Rewards:
        """Return the rewards for moves, progress and winning."""

    def slip(self, options: OptionsT) -> float:
        """Return the chance that the player slips to the left or right of the chosen direction."""
        return 0.0

    def num_levels(self, options: OptionsT) -> int | None:
        """Return the size of the fixed set of levels, if any. With such a set, `draw` takes an index, not a seed."""
        return options.num_levels
