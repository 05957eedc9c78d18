"""The compact mode: short pages of numbered choices, in which a policy that is trained from scratch can learn to shop.

Content words of the instruction get letters. A product's line lists the letters of the words missing from its texts, a
``V`` for each option without the wanted value, and a ``$`` if it costs too much. Of a goal, the page uses only the
instruction, so a customer could find all that in the shop.

First page  ``A desk B lamp; color red; under 40``, and the searches that can be made
Results     a line for each product: ``AV=3`` lacks a word and a value, ``ok=4`` nothing; and ``next=11``
Product     such a line without a number, ``buy=1``, and a line for each value of an option: ``color blue=5``;
            ``*color red=4`` is asked for, and ``color red chosen=4`` was chosen

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
from .session import PER_PAGE, Session

MAX_VALUES = 6
"""Largest number of values of options on a page; those that the instruction asks for come first."""

_LABELS = {BUY: "buy", NEXT: "next", BACK: "back", PREVIOUS: "previous"}
"""The names of buttons, in the order of their numbers, which thus hardly differ between pages."""
_QUERIES = ("all", "what and values", "what")
_LETTERS = "ABCDEFGHIJKLMNOPQRST"
_FIXED = (
    *(*_LABELS.values(), *_QUERIES, "another search, page", "chosen", "ok", "under", "bought, score"),
    *(_LETTERS, "V", string.digits, string.punctuation),
)
_WORDS = re.compile(r"[^\W_]+(?:['-][^\W_]+)*")
_PRICE = re.compile(r",? and price lower than (\d+\.\d+) dollars$")
_OPTIONS = re.compile(r" with ((?:(?! with )[^:,])+: .+)$")
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
        if self.options:
            return self.options[name] if self.options.get(name) in values else None
        named = (one for one in values if re.search(rf"(?<!\w){re.escape(one)}(?!\w)", self.what))
        return max(named, key=len, default=None)

    def values(self, product: Product) -> dict[str, str]:
        """Return the values of a product's options that are asked for, by the name of the option."""
        found = ((name, self.value(name, values)) for name, values in product.options.items())
        return {name: value for name, value in found if value is not None}


@lru_cache(maxsize=1 << 10)
def _words_of(text: str) -> frozenset[str]:
    return frozenset(_WORDS.findall(text.lower()))


@lru_cache(maxsize=1 << 10)
def read(instruction: str) -> Request:
    """Return what an instruction says."""
    text = instruction.lower()
    price = _PRICE.search(text)
    text = text[: price.start()] if price else text
    named = _OPTIONS.search(text)
    text = text[: named.start()] if named else text
    pairs = (pair.partition(": ") for pair in named[1].split(", and ")) if named else ()
    words = _WORDS.findall(text)
    return Request(
        what=text,
        options={name: value for name, _, value in pairs},
        cap=price[1] if price else "",
        words=tuple(dict.fromkeys(word for word in words if word not in _FILLERS)),
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
        if session.page == "search":
            yield self._wanted()
            for name, query in queries(session.goal.instruction).items():
                yield self._choice(name, f"search[{query}]")
            return
        buttons = [label for label in _LABELS if label in session.buttons()]
        if session.page == "results":
            searches = queries(session.goal.instruction).items()
            found = (name for name, query in searches if query.split() == list(session.keywords))
            yield f"{next(found, 'another search')}, page {session.number}"
            for product in session.shown:
                yield self._choice(self._lacks(product), f"click[{product.asin.lower()}]")
        if session.page == "item" and session.product is not None:
            yield self._lacks(session.product)
        for label in buttons:
            yield self._choice(_LABELS[label], f"click[{label.lower()}]")
        if session.page == "item" and session.product is not None:
            for name, value, mark in self._values(session.product):
                line = f"{name} {value} chosen" if session.options.get(name) == value else f"{mark}{name} {value}"
                yield self._choice(line, f"click[{value}]")

    def _choice(self, line: str, action: str) -> str:
        number = str(len(self.choices) + 1)
        self.choices[number] = action
        return f"{line}={number}"

    def _wanted(self) -> str:
        request = self._request
        words = " ".join(map(" ".join, zip(_LETTERS, request.words, strict=False)))
        price = [f"under {request.cap.removesuffix('.00')}"] if request.cap else []
        return "; ".join([words, *map(" ".join, request.options.items()), *price])

    def _lacks(self, product: Product) -> str:
        """Return the letters of the words, values and price that a product lacks; ``ok`` if it lacks nothing."""
        request, rules = self._request, self._session.rules
        values = (value for values in product.options.values() for value in values)
        texts = " ".join([product.title, *product.attributes, *product.bullets, product.description, *values])
        has = _words_of(texts)
        letters = [letter for letter, word in zip(_LETTERS, request.words, strict=False) if word not in has]
        missing = len(request.options) - len(request.values(product)) if request.options else 0
        is_dear = bool(request.cap) and rules.price(product) > float(request.cap)
        return "".join([*letters, "V" * missing, "$" * is_dear]) or "ok"

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
    """Return the searches of the first page by name: the instruction, and two that contain only `Request.words`."""
    request = read(instruction)
    what = " ".join(request.words)
    texts = (instruction.lower(), " ".join([what, *request.options.values()]), what)
    names: dict[str, str] = {}
    for name, text in zip(_QUERIES, texts, strict=True):
        if text and text not in names.values():
            names[name] = text
    return names


def vocabulary(*, data: Mapping[str, Path], catalogue: str = "webshop", **options: JSON) -> Iterator[str]:
    """Yield texts with all words of the compact pages; see `EnvSpec.vocabulary`."""
    yield from _FIXED
    yield from map(str, range(1, PER_PAGE + len(_LABELS)))  # products, back, previous and next
    yield from open_catalogue(data[catalogue]).words()
