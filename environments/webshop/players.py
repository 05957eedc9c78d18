"""Players of the shop: two simple rules to compare with, and an expert that knows the goal."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path

from envkit.errors import UsageError
from envkit.protocols import EpisodePlayer, Expert, Player
from envkit.types import JSON, Observation, Reset, RolloutRequest, Task

from ..options import override
from .compact import CompactPage, queries, read
from .env import VIEWS, View, WebShopOptions, open_session
from .products import BACK, BUY, NEXT, PREVIOUS, Product
from .session import PER_PAGE, Session


def _opened(data: Mapping[str, Path], defaults: WebShopOptions, task: Task) -> tuple[Session, View]:
    """Return the session of a task, and the view in which its pages are shown."""
    chosen = override(defaults, task.options)
    return open_session(data[chosen.catalogue], task.seed, chosen), chosen.observation


class FirstHit(Player):
    """Searches for the instruction, and buys the first product found as it is."""

    chooses_options = False

    def __init__(self, *, data: Mapping[str, Path], **options: JSON) -> None:
        self._open = partial(_opened, data, override(WebShopOptions(), options))

    def begin(self, request: RolloutRequest, start: Reset) -> EpisodePlayer:
        session, view = self._open(request.task)
        _check_same(session, view, start.observation.text)
        return _Plan(session, self.plan, is_compact=view == "compact")

    def plan(self, session: Session) -> Iterator[str]:
        """Yield the actions of an episode. Each changes `session` before the next one is taken."""
        yield f"search[{session.goal.instruction.lower()}]"
        if not session.shown:
            return
        yield _click(session.shown[0].asin)
        assert session.product is not None, "it was clicked"
        if self.chooses_options:
            for value in read(session.goal.instruction).values(session.product).values():
                yield _click(value)
        yield _click(BUY)


class RulePlayer(FirstHit):
    """Does as `FirstHit`, but chooses those values of the product's options that the instruction asks for."""

    chooses_options = True


class _Plan(EpisodePlayer):
    """One episode of a player whose actions do not depend on what it sees. Its own session has the same state."""

    def __init__(self, session: Session, plan: Callable[[Session], Iterator[str]], *, is_compact: bool) -> None:
        self._session = session
        self._actions = plan(session)
        self._is_compact = is_compact

    async def act(self, observation: Observation) -> str:
        action = next(self._actions, "")
        shown = _answer(self._session, action) if self._is_compact else action
        self._session.act(action)
        return shown


class WebShopExpert:
    """Buys what the goal asks for on a shortest path; see `envkit.protocols.TaskExpert`.

    The expert knows the goal of a task, which no page shows. Without a task it knows no moves.
    """

    def __init__(self, *, data: Mapping[str, Path], **options: JSON) -> None:
        self._open = partial(_opened, data, override(WebShopOptions(), options))

    def for_task(self, task: Task) -> Expert:
        """Return the expert of one episode of `task`. It must see every observation of the episode."""
        return _EpisodeExpert(*self._open(task))

    def moves(self, observation: Observation) -> Sequence[str]:
        return ()

    def is_hazardous(self, observation: Observation) -> bool:
        return False

    def answer(self, move: str) -> str:
        return f"<answer>{move}</answer>"


class _EpisodeExpert(WebShopExpert):
    """The expert of an episode that begins with `session`.

    It finds the state of the episode by trying what can be done in the last state. Among the products that its searches
    find, it aims to buy one with the highest score, which is 1 in most episodes.
    """

    def __init__(self, session: Session, view: View) -> None:
        self._state: Session = session
        self._view: View = view
        self._searches: dict[str, Session] = {}
        self._seen: Observation | None = None
        self._moves: Sequence[str] = ()
        self._scores: dict[int, float] = {}
        actions = [action for action in self._actions(session) if action.startswith("search")]
        self._searches = {action: self._after(session, action) for action in actions}
        goal = session.catalogue.number_of(session.goal.asin)
        assert goal is not None, "the goal was made from it"
        self._aim = self._score(goal)
        found = [results.hits for results in self._searches.values()]
        if all(self._first(hits) is None for hits in found):  # rare; only then are scores worth their time
            self._aim = max((self._score(hit) for hits in found for hit in hits), default=0.0)

    def moves(self, observation: Observation) -> Sequence[str]:
        if observation is not self._seen:
            if self._seen is None:
                _check_same(self._state, self._view, observation.text)
            state = self._find(observation.text)
            self._seen = observation
            if state is None:  # somebody else has searched for other words
                self._moves = [move for move in [_back(observation)] if move]
                self._state = self._state.copy()
                self._state.act(_click(BACK))
            else:
                self._state = state
                best = self._best(state)
                self._moves = best
                if self._view == "compact":
                    self._moves = [number for action in best if (number := _answer(state, action))]
        return self._moves

    def _find(self, text: str) -> Session | None:
        """Return the state that an observation shows: one that follows the last one, or the last one.

        Some states look the same: the view ``text`` does not show the chosen values. If so, the best move is assumed.
        """
        last = self._state
        best = (self._after(last, action) for action in (self._best(last) if self._seen else ()))
        others = (self._after(last, action) for action in self._actions(last))
        return next((one for one in chain(best, [last], others) if text.endswith(VIEWS[self._view](one))), None)

    def _actions(self, state: Session) -> list[str]:
        """Return the actions that a state allows; of the searches, only those that the expert considers."""
        if self._view == "compact":
            return list(CompactPage(state).choices.values())
        texts = queries(state.goal.instruction).values() if state.page == "search" else ()
        return [f"search[{text}]" for text in texts] + [_click(label) for label in state.clickables()]

    def _best(self, state: Session) -> list[str]:
        """Return the actions that begin a shortest path."""
        if state.page == "search":
            firsts = {action: self._first(results.hits) for action, results in self._searches.items()}
            pages = {action: first // PER_PAGE for action, first in firsts.items() if first is not None}
            return [action for action, page in pages.items() if page == min(pages.values())]
        if state.page == "results":
            first = (state.number - 1) * PER_PAGE
            shown = state.hits[first : first + PER_PAGE]
            if good := [hit for hit in shown if self._score(hit) >= self._aim]:
                return [_click(state.catalogue.product(hit).asin) for hit in good]
            if self._first(state.hits[first:]) is not None:
                return [_click(NEXT)]
            return [_click(BACK if self._first(state.hits) is None else PREVIOUS)]
        if state.page != "item" or state.product is None:
            return [] if state.page == "done" else [_click(PREVIOUS)]
        number = state.catalogue.number_of(state.product.asin)
        if number is None or self._score(number) < self._aim:
            return [_click(PREVIOUS)]
        missing = (value for name, value in self._wanted(state.product).items() if state.options.get(name) != value)
        return [_click(next(missing, BUY))]

    def _first(self, hits: Sequence[int]) -> int | None:
        """Return the place of the first hit that is good enough."""
        return next((place for place, hit in enumerate(hits) if self._score(hit) >= self._aim), None)

    def _score(self, number: int) -> float:
        """Return the score for buying a product with the options that the goal asks for."""
        if number not in self._scores:
            state, product = self._state, self._state.catalogue.product(number)
            self._scores[number] = state.rules.score(state.goal, product, self._wanted(product)).total
        return self._scores[number]

    def _wanted(self, product: Product) -> dict[str, str]:
        names = {value: name for name, values in product.options.items() for value in values}
        options = self._state.goal.options
        if isinstance(options, Mapping):
            return {name: value for name, value in options.items() if names.get(value) == name}
        return {names[value]: value for value in options if value in names}

    def _after(self, state: Session, action: str) -> Session:
        if action in self._searches:
            return self._searches[action]
        after = state.copy()
        after.act(action)
        return after


def _click(label: str) -> str:
    return f"click[{label.lower()}]"


def _answer(session: Session, action: str) -> str:
    """Return the number of an action on the compact page that a session shows; empty if the page does not offer it."""
    return next((number for number, one in CompactPage(session).choices.items() if one == action), "")


def _check_same(session: Session, view: View, text: str) -> None:
    """Check that an episode begins with the page of `session`, so that its shop has the same catalogue.

    Raises:
        UsageError: The pages differ.
    """
    if not text.endswith(VIEWS[view](session)):
        problem = "the shop of this episode has another catalogue or version than this machine"
        raise UsageError(f"{problem}; build the same data on both machines, or use --policy random")


def _back(observation: Observation) -> str:
    """Return the move that goes back to the first page; empty if a page does not offer it."""
    label = _click(BACK)
    if label in observation.legal_moves:
        return label
    numbered = re.search(r"^back=(\d+)$", observation.text, re.MULTILINE)
    return numbered[1] if numbered else ""
