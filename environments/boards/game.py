"""What a board game has to say, and the options that all of them have."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..options import check_boolean, check_choice, check_integer, check_number, check_symbols
from ..split import SPLITS, Split
from .episode_params import BatchParams, Rewards
from .physics import Physics

MANY_MOVES = "{count} moves at most, joined by ||, like this: <answer>up || left</answer>"
ONE_MOVE = "one move, like this: <answer>up</answer>"


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardOptions(ABC):
    """What can be changed about every board game.

    Attributes:
        max_moves: Moves until the episode is truncated, 1 to 10,000; None means what the game finds right for its size.
        split: Draw only levels of this split ("train", "validation" or "eval"); None draws any.
        num_levels: Draw from this many levels, which are the same for all seeds, 1 to 100,000; None draws a new one for
            every seed. Among hundreds of small ones some are alike.
        instructions: Whether observations carry rules and notices, or only the board.
        symbols: The characters that cells are shown as, in the order of the game's own; None means its own.
        spaced: Whether a space stands between the symbols of a line: a BPE tokenizer merges ``____`` into one token.
        actions_per_turn: Moves that one answer may hold, joined by ``||``, 1 to 100.
        format_penalty: What is subtracted from the reward when an answer cannot be read, 0 to 100.
    """

    canonical: ClassVar[str]
    """The game's own symbols."""
    for_make: ClassVar[frozenset[str]] = frozenset()
    """Options that only `make` takes: a caller of a served world must not choose them."""

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
        if self.split is not None:
            check_choice("split", self.split, SPLITS)
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
        """The symbol that each of the game's own is shown as."""
        return dict(zip(self.canonical, self.symbols or self.canonical, strict=True))

    @property
    def how_to_answer(self) -> str:
        """The end of the rules."""
        count = self.actions_per_turn
        return f"Answer with {ONE_MOVE if count == 1 else MANY_MOVES.format(count=count)}"


OptionsT = TypeVar("OptionsT", bound=BoardOptions)


class Level(NamedTuple):
    """Where an episode begins.

    Attributes:
        board: The board, in the game's own symbols.
        facts: What is known about it: ``shortest``, the moves of a shortest solution, unless nobody knows.
    """

    board: str
    facts: Mapping[str, int]


class BoardGame(ABC, Generic[OptionsT]):
    """A game on a board, without state.

    Attributes:
        physics: What moves do.
        usual: Its options when nobody chooses any.
    """

    physics: ClassVar[Physics]
    usual: OptionsT

    @abstractmethod
    def rules(self, options: OptionsT) -> str:
        """Return what a player is told before the first board."""

    @abstractmethod
    def draw(self, seed: int, options: OptionsT) -> Level:
        """Return the level of `seed`: the same in every process.

        Raises:
            OptionError: There is no level such as the options ask for.
        """

    @abstractmethod
    def rewards(self, options: OptionsT) -> Rewards:
        """Return what is rewarded."""

    @abstractmethod
    def tiles(self) -> NDArray[np.uint8]:
        """Return pictures of the cells by code, of shape (codes, pixels, pixels, 3)."""

    @property
    @abstractmethod
    def styles(self) -> Mapping[str, str]:
        """The terminal's colours, by symbol."""

    def slip(self, options: OptionsT) -> float:
        """Return the chance that a move goes to one of its sides."""
        return 0.0

    def num_levels(self, options: OptionsT) -> int | None:
        """Return how many levels there are; None when every seed has its own. `draw` then takes their numbers."""
        return options.num_levels

    def terms(self, options: OptionsT) -> BatchParams:
        """Return the numbers that an episode with these options is played by."""
        return BatchParams(
            options.move_limit,
            float(self.slip(options)),
            float(options.format_penalty),
            *self.rewards(options),
            options.actions_per_turn,
            options.instructions,
        )
