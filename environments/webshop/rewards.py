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
from typing import NamedTuple

from .goals import Goal
from .nouns import nouns
from .products import Product

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
    """Return the score of the original.

    Args:
        goal: What to buy.
        product: What was bought.
        options: The chosen values by the name of the option.
        price: Price of the purchase in dollars.
        title_nouns: The nouns of the goal's title and of the product's title, in lower case; None to find them.
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
