"""The score of a purchase, by the rules of the original (Yao et al., 2022, arXiv:2207.01206) and by ours.

``score = type * (attributes + options + price) / (goal attributes + goal options + 1)``. The three sums count what the
purchase has of what the goal asks for, and the type says how similar the products are. Our rules match options by
their names, and the goal's own product always has its attributes, so that buying what the goal asks for scores 1. A
product of another search has a type of at most 0.5: similar words do not make a rug a metal sign.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple, TypeAlias

from .goals import Goal, charged_price
from .products import Product

VERSION = 1
"""Version of our rules and of the goals that they draw; it grows with every change of a score or goal."""
_SIMILAR = 85
"""Two texts match if their similarity is above this, of 100."""
_DUMMY = ("DUMMY_ATTR",)
"""The original's attributes of a product without any."""

# The colours of the original, in its order (princeton-nlp/WebShop, web_agent_site/engine/normalize.py).
# Copyright (c) 2022 Princeton Natural Language Processing, MIT license.
_COLORS = tuple(
    """alabaster apricot aqua ash asphalt azure banana beige black blue blush bordeaux bronze brown burgundy camel camo
    caramel champagne charcoal cheetah chestnut chocolate christmas coffee cognac copper coral cranberry cream crystal
    dark denim eggplant elephant espresso fuchsia gold granite grape graphite grass gray green grey heather indigo ivory
    ivy khaki lavender lemon leopard light lilac lime magenta maroon mauve merlot midnight mint mocha multicolor
    mushroom mustard natural navy nude olive orange peach pewter pink plum purple rainbow red rose royal rust sand
    sapphire seashell silver skull slate steel stone stonewash sunflower tan taupe teal tiger turquoise violet walnut
    wheat white wine yellow""".split()  # noqa: SIM905 - easier to read
)

_OTHERS = frozenset(
    """a an the and or but nor so yet for of in on at to from by with without into onto over under about as is are was
    were be been being am do does did has have had having will would can could shall should may might must this that
    these those it its i you he she we they me him her us them my your his our their what which who whom whose not no
    yes if than then when while where how all any both each few more most other some such only own same too very up down
    out off again once here there why just also per via plus & + - between during before after above below
    find buy get need want use uses used made make makes offers offer enjoy keep keeps looking fit fits wear install
    clean assemble carry
    new old big small large medium mini long short high low good great best soft hard thick thin wide narrow deep light
    dark bright hot cold warm cool fresh dry wet natural organic pure raw sweet bitter spicy slim loose tight classic
    modern vintage retro casual formal deluxe premium portable adjustable durable lightweight heavy extra upgraded
    universal compatible removable reusable washable waterproof resistant free electric digital smart wireless black
    white blue red green pink beige brown silver grey gray purple yellow navy clear multi x-large xx-large non ultra
    super full half double single dual triple professional personal everyday daily easy quick fast""".split()  # noqa: SIM905 - easier to read
)
"""Function words, verbs and adjectives that are frequent in titles."""
_ADJECTIVE_ENDINGS = ("able", "ible", "ful", "less", "ous", "ive", "ic", "ish", "proof")
_NUMBER = re.compile(r"[\d.,/%\"'x*]+")
_TOKEN = re.compile(r"[a-z]+(?='s\b)|'s|[^\W\d_]+|\d[\w.,/%\"'*]*|\w+|[^\w\s]")


class Score(NamedTuple):
    """The score of a purchase and its parts.

    Attributes:
        total: The score, 0 to 1.
        type: Factor for the kind of product: 1, 0.5, 0.1 or 0.
        title: Share of the nouns in the goal's title that the title of the purchase has.
        attributes: Number of the goal's attributes that the purchase has.
        options: Number of the goal's options that were chosen.
        price: Whether the price is at most the goal's highest price.
        same_query: Whether both products come from the same search.
        same_category: Whether both products share at least two categories.
    """

    total: float
    type: float
    title: float
    attributes: int
    options: int
    price: bool
    same_query: bool
    same_category: bool


def original_score(
    goal: Goal,
    product: Product,
    options: Mapping[str, str],
    price: float,
    title_nouns: tuple[Sequence[str], Sequence[str]] | None = None,
) -> Score:
    """Return the score of the original, given the chosen values by the name of the option, and a price in dollars.

    `title_nouns` are the nouns of the goal's title and of the product's title, in lower case; None to find them.
    """
    wanted = goal.options.items() if isinstance(goal.options, Mapping) else goal.options
    chosen = [_color(value) for value in options.values()]
    # The original compares an option of a synthetic goal as a text that contains its name and its value.
    count = sum(any(_is_similar(one, str(want)) for one in chosen) for want in map(_color, wanted))
    return _score(goal, product, count, price, title_nouns)


def strict_score(goal: Goal, product: Product, options: Mapping[str, str], price: float) -> Score:
    """Return the score by our rules; see `original_score` for the arguments. The goal's options must have names."""
    assert isinstance(goal.options, Mapping), "our goals name their options"
    count = sum(options.get(name) == value for name, value in goal.options.items())
    return _score(goal, product, count, price, None, is_strict=True)


def _score(
    goal: Goal,
    product: Product,
    options: int,
    price: float,
    title_nouns: tuple[Sequence[str], Sequence[str]] | None,
    *,
    is_strict: bool = False,
) -> Score:
    is_same = is_strict and product.asin == goal.asin
    want, have = title_nouns or (nouns(goal.title), nouns(product.title))
    title = len({*want} & {*have}) / len(want) if want else 0.2
    same_query = product.query == goal.query
    same_category = len(_categories(product.path) & _categories(goal.path)) >= 2
    kind = 1.0 if same_query or same_category or title > 0.2 else 0.5
    if title < 0.1:
        kind = 0.1 if title else 0.0
    if is_strict:
        kind = 1.0 if is_same or same_query else min(kind, 0.5)
    texts = (product.title.lower(), " ".join(product.bullets).lower(), product.description.lower())
    attributes = sum(
        is_same
        or any(_is_similar(one, want) for one in product.attributes or _DUMMY)
        or any(want in text for text in texts)
        for want in goal.attributes
    )
    fits = price <= goal.cap
    total = (attributes + options + fits) / (len(goal.attributes) + len(goal.options) + 1) * kind
    return Score(total, kind, title, attributes, options, fits, same_query, same_category)


def _categories(path: str) -> set[str]:
    return {part.strip() for part in path.split("›")}


def _color(option: str | tuple[str, str]) -> str | tuple[str, str]:
    """Return the first colour that an option contains, or the option. A pair must have the colour as an element."""
    return next((color for color in _COLORS if color in option), option)


@lru_cache(maxsize=1 << 14)
def _is_similar(one: object, other: object) -> bool:
    return token_set_ratio(str(one), str(other)) > _SIMILAR


def token_set_ratio(one: str, other: str) -> int:
    """Return how similar the sets of words of two texts are, 0 to 100, as thefuzz's function of this name does.

    Three texts are compared in pairs, and the highest similarity counts: the common words; these and the rest of the
    first text; and these and the rest of the second text. Characters outside ASCII are left out.
    """
    first, second = _words(one), _words(other)
    if not first or not second:
        return 0
    common, left, right = (" ".join(sorted(some)) for some in (first & second, first - second, second - first))
    if common and not (left and right):
        return 100
    with_left, with_right = f"{common} {left}".strip(), f"{common} {right}".strip()
    pairs = [(with_left, with_right), *([(common, with_left), (common, with_right)] if common else [])]
    return max(round(200 * _common_length(a, b) / (len(a) + len(b))) for a, b in pairs)


def _words(text: str) -> set[str]:
    ascii_text = text.encode("ascii", "ignore").decode()
    return set(re.sub(r"[^a-zA-Z0-9_]", " ", ascii_text).lower().split())


def _common_length(one: str, other: str) -> int:
    """Return the length of the longest common subsequence of two texts."""
    before = [0] * (len(other) + 1)
    for a in one:
        row = [0]
        for place, b in enumerate(other, 1):
            row.append(before[place - 1] + 1 if a == b else max(before[place], row[-1]))
        before = row
    return before[-1]


@lru_cache(maxsize=1 << 14)
def nouns(title: str) -> Sequence[str]:
    """Return the nouns of a title in lower case, in their order, with repetitions.

    The original uses the statistical tagger of spaCy's ``en_core_web_lg``. This tagger needs no model, and is the same
    on every machine. It counts a word as a noun if it is in no list of other words and has no ending of an adjective:
    titles of products are little else than nouns and adjectives.
    """
    return tuple(
        token
        for token in _TOKEN.findall(title.lower())
        if any(one.isascii() and one.isalnum() for one in token)
        and token not in _OTHERS
        and not (token.endswith("ly") or (len(token) > 5 and token.endswith(_ADJECTIVE_ENDINGS)))
        and not _NUMBER.fullmatch(token)
    )


class StrictRules:
    """Our rules: the seed decides the prices, which pages show, and options match by their names.

    An action must be complete, and a search is possible only on the first page.
    """

    is_strict = True

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def price(self, product: Product) -> float:
        """Return the price in dollars for which the product is sold."""
        return charged_price(product, self._seed)

    def price_tag(self, product: Product) -> str:
        """Return the price that pages show."""
        return f"${self.price(product):.2f}"

    def score(self, goal: Goal, product: Product, options: Mapping[str, str]) -> Score:
        return strict_score(goal, product, options, self.price(product))


class OriginalRules:
    """The rules of the original, for comparisons, with the prices by product id that `original_prices` has drawn."""

    is_strict = False

    def __init__(self, prices: Mapping[str, float]) -> None:
        self._prices = prices

    def price(self, product: Product) -> float:
        return self._prices[product.asin]

    def price_tag(self, product: Product) -> str:
        return product.price_tag

    def score(self, goal: Goal, product: Product, options: Mapping[str, str]) -> Score:
        return original_score(goal, product, options, self.price(product))


Rules: TypeAlias = StrictRules | OriginalRules
