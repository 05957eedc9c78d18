r"""WebShop: find and buy the product that an instruction asks for.

Observation  the page of the shop that is shown, with the instruction; see the option ``observation``
Actions      ``search[words]`` on the first page, ``click[label]`` elsewhere. With ``observation="compact"`` the number
             of one of the choices that the page lists
Reward       a purchase earns its score, 0 to 1: the share of what the instruction asks for. Other actions earn 0
Ends         terminated after a purchase; truncated after ``max_turns`` actions
Rules        ``rules="strict"``, for training: the seed decides goal and prices in any process, options match by their
             names, and buying what the goal asks for scores 1. ``rules="parity"``: everything as in the original, whose
             prices depend on the process; here they are the prices it draws after ``random.seed(0)``
Options      see `WebShopOptions`
Info         ``action_is_valid``, ``bought``, ``score`` (0 before the purchase), ``success`` (whether the score is 1)

An action that the page does not offer changes nothing. Under the strict rules the page then begins with a notice.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any, ClassVar, Literal, TypeAlias

import gymnasium

from envkit.env import check_seed
from envkit.errors import OptionError, StepOrderError, UsageError
from envkit.spaces import Utf8Text
from envkit.types import JSON, Info, Options, stable_hash

from ..answer import answer_text
from ..options import check_boolean, check_choice, check_integer, check_split, override
from ..split import Split, split_of
from . import pages
from .catalogue.store import open_catalogue
from .compact import CompactPage, queries
from .goals import Goal, GoalKind, draw_goal, original_goals, original_prices, weights
from .products import BUY
from .rewards import VERSION, OriginalRules, Rules, StrictRules
from .session import Session

View: TypeAlias = Literal["text", "text_rich", "compact"]

_MAX_TURNS = 15
_MAX_TEXT = 1 << 20
_HOW_TO = (
    "You are shopping. Find the product that the instruction asks for, choose its options, and buy it. Answer with "
    "one action: search[words] on the first page, or click[label] for a button, a product id or a value of an option "
    f"on the page, such as click[{BUY}].\n\n"
)
_NOTICE = "Nothing happened: the page does not offer {!r}. Write search[words] on the first page, or click[label].\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class WebShopOptions:
    """Options of the shop.

    Attributes:
        rules: ``"strict"`` or ``"parity"``.
        observation: ``"text_rich"``: a line for each part of the page, with marked buttons. ``"text"``: the same in one
            line without marks. ``"compact"``: short pages of numbered choices, for policies trained from scratch.
        catalogue: Name of the data with the products, such as ``webshop`` or ``webshop-files``; see ``envkit data``.
        goals: ``"synthetic"`` or ``"human"``, by who wrote the instruction.
        split: Split of the goals by product; None for all. The original has no splits.
        goal: Index of the goal in the original's order, only under the parity rules; None: the seed chooses.
        max_turns: Actions after which the episode is truncated; None: 15 under the strict rules, else no limit.
        instructions: Whether the first observation begins with how to act; None: only under the strict rules.
    """

    rules: Literal["strict", "parity"] = "strict"
    observation: View = "text_rich"
    catalogue: str = "webshop"
    goals: GoalKind = "synthetic"
    split: Split | None = None
    goal: int | None = None
    max_turns: int | None = None
    instructions: bool | None = None

    def __post_init__(self) -> None:
        check_choice("rules", self.rules, ("strict", "parity"))
        check_choice("observation", self.observation, ("text", "text_rich", "compact"))
        check_choice("goals", self.goals, ("synthetic", "human"))
        check_split(self.split)
        if self.goal is not None:
            check_integer("goal", self.goal, low=0, high=1 << 31)
        if self.max_turns is not None:
            check_integer("max_turns", self.max_turns, low=1, high=10_000)
        if self.instructions is not None:
            check_boolean("instructions", self.instructions)
        if self.observation == "compact" and not self.is_strict:
            raise OptionError("observation", "compact pages are only for rules='strict'; use text or text_rich")
        if self.goal is not None and (self.is_strict or self.split is not None):
            raise OptionError("goal", "only for rules='parity' and goals of any split; leave it out")

    @property
    def is_strict(self) -> bool:
        return self.rules == "strict"

    @property
    def turn_limit(self) -> int | None:
        return _MAX_TURNS if self.max_turns is None and self.is_strict else self.max_turns


def open_session(folder: Path, seed: int, options: WebShopOptions) -> Session:
    """Return the session with which the episode of `seed` begins, with the catalogue in `folder`.

    Raises:
        OptionError: The catalogue has no such goal.
    """
    catalogue = open_catalogue(folder)
    if options.is_strict:
        return Session(catalogue, draw_goal(catalogue, seed, options.split, options.goals), StrictRules(seed))
    rules, all_goals = _original(folder, options.goals)
    goals, cumulative = _part(folder, options.goals, options.split)
    if not goals:
        raise OptionError("goals", f"the catalogue has no {options.goals} goals of split {options.split or 'any'}")
    if options.goal is None:
        drawn = stable_hash("WebShop original goal", seed) / 2**64 * cumulative[-1]
        return Session(catalogue, goals[min(bisect_right(cumulative, drawn), len(goals) - 1)], rules)
    if options.goal >= len(all_goals):
        raise OptionError("goal", f"the catalogue has {len(all_goals)} goals; use at most {len(all_goals) - 1}")
    return Session(catalogue, all_goals[options.goal], rules)


@lru_cache(maxsize=2)
def _original(folder: Path, kind: GoalKind) -> tuple[Rules, list[Goal]]:
    """Return the original's rules with all prices, and its goals."""
    catalogue = open_catalogue(folder)
    products = [catalogue.product(number) for number in range(len(catalogue))]
    rng = Random(0)
    prices = original_prices(products, rng)
    return OriginalRules(prices), original_goals(products, prices, kind, rng)


@lru_cache(maxsize=8)
def _part(folder: Path, kind: GoalKind, split: Split | None) -> tuple[list[Goal], list[float]]:
    """Return the original's goals of a split, and their cumulative weights."""
    _, goals = _original(folder, kind)
    weighted = weights(goals) if kind == "synthetic" else [1.0] * len(goals)
    pairs = [pair for pair in zip(goals, weighted, strict=True) if split in (None, split_of(pair[0].asin))]
    return [goal for goal, _ in pairs], list(accumulate(weight for _, weight in pairs))


class WebShop(gymnasium.Env[str, str]):
    """An environment with one purchase per episode, of the catalogues in the folders `data`.

    With the `render_mode` ``"html"``, `render` returns the page as an HTML document. The options are those of
    `WebShopOptions`; ``reset(options=...)`` overrides single ones for one episode.

    Raises:
        OptionError: An option is unknown or its value is invalid.
        UsageError: The catalogue is not on this machine.
    """

    metadata = {  # noqa: RUF012 - as Gymnasium's
        "render_modes": ["html"],
        "metrics": {"action_is_valid": "mean", "bought": "last", "score": "last", "success": "last"},
    }

    options: ClassVar[Options] = asdict(WebShopOptions())

    def __init__(self, *, data: Mapping[str, Path], render_mode: str | None = None, **options: JSON) -> None:
        if render_mode is not None:
            check_choice("render_mode", render_mode, ("html",))
        self.render_mode = render_mode
        self.observation_space = Utf8Text(_MAX_TEXT)
        self.action_space = Utf8Text(_MAX_TEXT)
        self._data = data
        self._options = self._defaults = override(WebShopOptions(), options)
        self._session: Session | None = None
        self._shown: Session | None = None  # kept after the end of the episode, for `render`
        self._turns = 0
        self._moves: Mapping[str, str] = {}
        check_choice("catalogue", self._defaults.catalogue, data)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        """Start an episode."""
        self._session = None
        chosen = override(self._defaults, options)
        check_seed(seed)
        super().reset(seed=seed)
        drawn = int(self.np_random.integers(1 << 31)) if seed is None else int(seed)
        check_choice("catalogue", chosen.catalogue, self._data)
        session = open_session(self._data[chosen.catalogue], drawn, chosen)
        self._session = self._shown = session
        self._options, self._turns = chosen, 0
        has_instructions = chosen.is_strict if chosen.instructions is None else chosen.instructions
        notice = _HOW_TO if has_instructions and chosen.observation != "compact" else ""
        shown, info = self._observe(session, notice)
        level: Info = {"options": len(session.goal.options), "attributes": len(session.goal.attributes)}
        versions: Info = {"rules": f"{chosen.rules} {VERSION}", "catalogue": session.catalogue.digest}
        return shown, {**info, "level": level, "versions": versions}

    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        """Carry out an action."""
        session = self._session
        if session is None:
            raise StepOrderError("step before reset, or after the end of the episode")
        if not isinstance(action, str):
            raise UsageError(f"an action must be text, got {action!r}")
        self._turns += 1
        chosen = self._options
        if chosen.observation == "compact":
            is_valid = session.act(self._moves.get(answer_text(action).strip(), ""))
        else:
            is_valid = session.act(answer_text(action) if chosen.is_strict else _unwrapped(action))
        terminated = session.page == "done"
        truncated = not terminated and self._turns == chosen.turn_limit
        has_notice = chosen.is_strict and chosen.observation != "compact" and not is_valid
        shown, info = self._observe(session, _NOTICE.format(_short(action)) if has_notice else "")
        if terminated or truncated:
            self._session = None
        reward = session.score.total if session.score else 0.0
        return shown, reward, terminated, truncated, {"action_is_valid": is_valid, **info}

    def render(self) -> Any:
        """Return the page as an HTML document; None before the first reset, or if `render_mode` is None."""
        if self.render_mode is None or self._shown is None:
            return None
        is_compact = self._options.observation == "compact"
        return pages.html(self._shown, {move: number for number, move in self._moves.items()} if is_compact else None)

    def _observe(self, session: Session, notice: str) -> tuple[str, Info]:
        if self._options.observation == "compact":
            page = CompactPage(session)
            text, self._moves = page.text, page.choices
            moves: list[JSON] = [*page.choices]
        else:
            text = VIEWS[self._options.observation](session)
            searches = queries(session.goal.instruction).values() if session.page == "search" else ()
            moves = [f"search[{query}]" for query in searches]
            moves += [f"click[{label}]" for label in session.clickables() if label != "search"]
        score = session.score.total if session.score else 0.0
        info: Info = {"bought": session.page == "done", "score": score, "success": score == 1.0}
        return notice + text, {"legal_moves": moves, **info}


VIEWS: Mapping[View, Callable[[Session], str]] = {
    "text": pages.text,
    "text_rich": pages.rich_text,
    "compact": lambda session: CompactPage(session).text,
}
"""The page that a session shows, for each value of the option ``observation``."""


def _unwrapped(action: str) -> str:
    """Return an action of the original without the tags that renderers of base models put around it."""
    return action.strip().removeprefix("<answer>").removesuffix("</answer>") if "<answer>" in action else action


def _short(action: str) -> str:
    return action if len(action) <= 80 else action[:77] + "..."
