"""The compact mode: short pages of numbered choices, in which a policy that is trained from scratch can learn to shop.

A page shows what a customer can see or work out, and marks what the instruction asks for, as the snippets of a search
engine do. Of a product it shows the attributes and the words of the title that occur in the instruction, the names of
the options whose wanted value it has, and whether the price fits. It knows nothing else of the goal.

Results  a line for each product, such as ``mattress+heavy duty+size+price=3``, and ``back``, ``previous``, ``next``
Product  such a line without a number, and a line for each value of an option: ``size king=2``; ``*size queen=1`` is
         asked for, and ``size queen chosen=1`` was chosen

The choices are the numbers behind ``=``.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from envkit.types import JSON

from .catalogue.store import open_catalogue
from .products import BACK, BUY, NEXT, PREVIOUS, Product
from .session import Session

MAX_VALUES = 8
"""Largest number of values of options on a page; those that the instruction asks for come first."""

_LABELS = {BACK: "back", PREVIOUS: "previous", NEXT: "next", BUY: "buy"}
_QUERIES = ("all", "what and values", "what")
_FIXED = (
    *_LABELS.values(),
    *_QUERIES,
    "page of another search",
    "chosen",
    "price",
    "under",
    "bought, score",
    string.digits + string.punctuation,
)
_PRICE = re.compile(r",? and price lower than (\d+\.\d+) dollars$")
_OPTIONS = re.compile(r" with ([^:,]+: .+)$")
_FILLERS = frozenset(
    """a an the and or of to for with in on by that which are is be am was it its this these those i me my we us you
    your he she they find get need want like would looking look search searching shopping buy show see let please help
    can could do does have has sell interested am i'm i'd some any something one ones trying try sister brother asked
    hello time replace mine so as gift should""".split()  # noqa: SIM905 - easier to read
)
"""Words of an instruction that say nothing about the product."""


class Request(NamedTuple):
    """What an instruction says.

    Attributes:
        what: The instruction in lower case, without options and price.
        options: The values of options by name, where the instruction names options; else empty.
        cap: Highest price in dollars, as text; empty for no limit.
        words: The words of `what` without those that say nothing about the product.
    """

    what: str
    options: Mapping[str, str]
    cap: str
    words: tuple[str, ...]

    def value(self, name: str, values: Sequence[str]) -> str | None:
        """Return which of the values of an option is asked for; None if none is."""
        if name in self.options:
            return self.options[name] if self.options[name] in values else None
        named = (one for one in values if re.search(rf"(?<!\w){re.escape(one)}(?!\w)", self.what))
        return max(named, key=len, default=None)

    def values(self, product: Product) -> dict[str, str]:
        """Return the values of a product's options that are asked for, by the name of the option."""
        found = ((name, self.value(name, values)) for name, values in product.options.items())
        return {name: value for name, value in found if value is not None}


@lru_cache(maxsize=1 << 10)
def read(instruction: str) -> Request:
    """Return what an instruction says."""
    text = instruction.lower()
    price = _PRICE.search(text)
    text = text[: price.start()] if price else text
    named = _OPTIONS.search(text)
    text = text[: named.start()] if named else text
    pairs = (pair.partition(": ") for pair in named[1].split(", and ")) if named else ()
    words = (word.strip(".,?!") for word in text.split())
    return Request(
        what=text,
        options={name: value for name, _, value in pairs},
        cap=price[1] if price else "",
        words=tuple(word for word in words if word and word not in _FILLERS),
    )


class CompactPage:
    """The page that a session shows.

    Attributes:
        text: The page.
        choices: What each number does, as an action of `Session.act`.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._request = read(session.goal.instruction)
        self.choices: dict[str, str] = {}
        self.text = "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        session = self._session
        if session.score is not None:
            yield f"bought, score {session.score.total:.2f}"
            return
        yield self._wanted()
        if session.page == "search":
            for name, query in queries(session.goal.instruction).items():
                yield self._choice(name, f"search[{query}]")
            return
        if session.page == "results":
            searches = queries(session.goal.instruction).items()
            found = (name for name, query in searches if query.split() == list(session.keywords))
            yield f"page {session.number} of {next(found, 'another search')}"
            for product in session.shown:
                yield self._choice(self._matches(product), f"click[{product.asin.lower()}]")
        if session.page == "item" and session.product is not None:
            yield self._matches(session.product)
            for name, value, mark in self._values(session.product):
                line = f"{name} {value} chosen" if session.options.get(name) == value else f"{mark}{name} {value}"
                yield self._choice(line, f"click[{value}]")
        for label in session.buttons():
            if label in _LABELS:
                yield self._choice(_LABELS[label], f"click[{label.lower()}]")

    def _choice(self, line: str, action: str) -> str:
        number = str(len(self.choices) + 1)
        self.choices[number] = action
        return f"{line}={number}"

    def _wanted(self) -> str:
        request = self._request
        price = [f"under {request.cap.removesuffix('.00')}"] if request.cap else []
        return "; ".join([" ".join(request.words), *map(" ".join, request.options.items()), *price])

    def _matches(self, product: Product) -> str:
        """Return what a product has of what is asked for."""
        request, rules = self._request, self._session.rules
        attributes = [one for one in product.attributes if one in request.what or one in " ".join(request.words)]
        named = {word for one in attributes for word in one.split()}
        title = {*product.title.lower().split()}
        words = [word for word in request.words if word in title and word not in named]
        fits = not request.cap or rules.price(product) <= float(request.cap)
        return "+".join([" ".join(words), *attributes, *request.values(product), *(["price"] if fits else [])])

    def _values(self, product: Product) -> Sequence[tuple[str, str, str]]:
        """Return name, value and mark of the values to show."""
        wanted = self._request.values(product)
        found = [
            (name, one, "*" if wanted.get(name) == one else "")
            for name in product.options
            for one in product.options[name]
        ]
        return sorted(found, key=lambda one: not one[2])[:MAX_VALUES]


def queries(instruction: str) -> dict[str, str]:
    """Return the searches of the first page by their names: the instruction, and two without words that say nothing."""
    request = read(instruction)
    what = " ".join(request.words)
    texts = (instruction.lower(), " ".join([what, *request.options.values()]), what)
    names: dict[str, str] = {}
    for name, text in zip(_QUERIES, texts, strict=True):
        if text and text not in names.values():
            names[name] = text
    return names


def vocabulary(*, data: Mapping[str, Path], catalogue: str = "webshop", **options: JSON) -> Iterator[str]:
    """Yield the texts of which compact pages consist; see `EnvSpec.vocabulary`."""
    yield from _FIXED
    yield from open_catalogue(data[catalogue]).words()
