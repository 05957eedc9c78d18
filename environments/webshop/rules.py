"""The rules of a shop: those of the original, and ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from .goals import Goal, charged_price
from .products import Product
from .rewards import Score, original_score, strict_score

VERSION = 1
"""Version of our rules and of the goals that they draw; it grows with every change of a score or goal."""


class StrictRules:
    """Our rules: the seed decides the prices, which pages show, and options match by their names.

    An action must be complete, and a search is possible only on the first page.

    Args:
        seed: Seed of the episode.
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
    """The rules of the original, for comparisons.

    Args:
        prices: The prices by product id, as `envkit.environments.webshop.goals.original_prices` draws them.
    """

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
