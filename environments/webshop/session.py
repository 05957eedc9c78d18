"""The shop's pages as a state machine: what one customer sees, and what an action changes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Literal, TypeAlias

from .catalogue.store import Catalogue
from .goals import Goal
from .products import BACK, BUY, DETAILS, NEXT, PREVIOUS, SEARCH, Product
from .rewards import Rules, Score

PageName: TypeAlias = Literal["search", "results", "item", "detail", "done"]

MAX_RESULTS = 50
PER_PAGE = 10
MAX_QUERY = 500
"""Maximum characters of a query under the strict rules; a longer one is cut."""

_STRICT_ACTION = re.compile(r"(search|click)\s*\[((?:(?!\]\s*(?:search|click)\s*\[)[^\n])*)\]", re.IGNORECASE)


class Session:
    """One customer with one goal.

    Attributes:
        page: The page that is shown.
        keywords: Words of the last search.
        number: Number of the results page, from 1.
        hits: Product numbers of all results, at most `MAX_RESULTS`.
        product: The chosen product; None on the first page and on results pages.
        options: The chosen values by the name of the option.
        detail: One of `DETAILS`, on a detail page.
        visited: Ids of the products that were opened since the first page.
        score: Score of the purchase; None before it.
    """

    def __init__(self, catalogue: Catalogue, goal: Goal, rules: Rules) -> None:
        self.catalogue = catalogue
        self.goal = goal
        self.rules = rules
        self.score: Score | None = None
        self._begin()

    def copy(self) -> Session:
        """Return a session in the same state."""
        other = object.__new__(Session)
        other.__dict__.update(self.__dict__)
        other.options, other.visited = dict(self.options), set(self.visited)
        return other

    @property
    def shown(self) -> Sequence[Product]:
        """The products of the results page that is shown."""
        first = (self.number - 1) * PER_PAGE
        return [self.catalogue.product(hit) for hit in self.hits[first : first + PER_PAGE]]

    def buttons(self) -> Iterator[str]:
        """Yield the labels of the buttons that are not options or products, from top to bottom."""
        if self.page == "search":
            yield SEARCH
        elif self.page == "results":
            yield BACK
            if self.number > 1:
                yield PREVIOUS
            yield NEXT
        elif self.page in ("item", "detail"):
            yield from (BACK, PREVIOUS)
            if self.page == "item":
                yield from (*DETAILS, BUY)

    def clickables(self) -> list[str]:
        """Return what can be clicked: buttons, products and values of options, in lower case."""
        found = [label.lower() for label in self.buttons()]
        if self.page == "results":
            found += [product.asin.lower() for product in self.shown]
        if self.page == "item" and self.product is not None:
            found += [value for values in self.product.options.values() for value in values]
        return list(dict.fromkeys(found))

    def act(self, action: str) -> bool:
        """Carry out an action such as ``search[red shoes]``. Return False, and change nothing, if it is impossible."""
        if self.page == "done":
            return False
        if self.rules.is_strict:
            found = _STRICT_ACTION.fullmatch(action.strip())
            if found is None:
                return False
            name, argument = found[1].lower(), found[2].strip().lower()
            if name == "search":
                query = " ".join(argument[:MAX_QUERY].split())
                return self.page == "search" and bool(query) and self._search(query.split(" "), 1)
            return self._click(argument)
        name, argument = _original_action(action)
        return self._search(argument.split(" "), 1) if name == "search" else name == "click" and self._click(argument)

    def _begin(self) -> bool:
        self.page: PageName = "search"
        self.keywords: Sequence[str] = ()
        self.number = 1
        self.hits: Sequence[int] = ()
        self.product: Product | None = None
        self.options: dict[str, str] = {}
        self.detail = ""
        self.visited: set[str] = set()
        return True

    def _search(self, keywords: Sequence[str], number: int) -> bool:
        if keywords != self.keywords:
            self.hits = self.catalogue.search(" ".join(keywords), MAX_RESULTS)
        self.page, self.keywords, self.number = "results", keywords, number
        self.product, self.options = None, {}
        return True

    def _click(self, label: str) -> bool:
        if label == SEARCH.lower() or label not in self.clickables():
            return False
        if label == BACK.lower():
            return self._begin()
        if label == NEXT.lower() and self.page == "results":
            return self._search(self.keywords, self.number + 1)
        if label == PREVIOUS.lower():
            if self.page == "detail":
                self.page = "item"
                return True
            return self._search(self.keywords, self.number - (self.page == "results"))
        if self.page == "results":
            self.page = "item"
            self.product = next(product for product in self.shown if product.asin.lower() == label)
            self.visited.add(self.product.asin)
            return True
        assert self.product is not None, "only results have no product"
        if label == BUY.lower():
            self.page, self.score = "done", self.rules.score(self.goal, self.product, self.options)
        elif label in (detail.lower() for detail in DETAILS):
            self.page, self.detail = "detail", label.capitalize()
        else:
            # A value that several options have belongs to the last one.
            name = [name for name, values in self.product.options.items() if label in values][-1]
            self.options[name] = label
        return True


def _original_action(action: str) -> tuple[str, str]:
    r"""Return name and argument of an action; empty if the text is not an action.

    This is what the original finds with the pattern ``(.+)\[(.+)\]``, which takes quadratic time on some texts.
    """
    line = action.partition("\n")[0]
    end = line.rfind("]")
    start = line.rfind("[", 1, max(end - 1, 0))
    return (line[:start], line[start + 1 : end].lower()) if start > 0 else ("", "")
