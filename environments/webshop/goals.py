"""Goals: what a customer has to buy, and the instruction that says so."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from random import Random
from typing import Literal, TypeAlias

import msgspec

from envkit.errors import OptionError
from envkit.types import stable_hash

from ..split import Split
from .catalogue.store import Catalogue
from .products import Product

GoalKind: TypeAlias = Literal["synthetic", "human"]

NO_CAP = 1_000_000.0
"""Highest price, in dollars, of a goal without a highest price."""


class Goal(msgspec.Struct, frozen=True):
    """A goal.

    Attributes:
        asin: Id of the product from which the goal was made.
        instruction: The whole instruction, with options and highest price.
        attributes: The properties that the product must have.
        options: The values to choose, by the name of the option; for the original's human goals the values alone.
        cap: Highest price in dollars; `NO_CAP` for no limit.
        query, title, path, category: Those of the product.
    """

    asin: str
    instruction: str
    attributes: tuple[str, ...]
    options: Mapping[str, str] | tuple[str, ...]
    cap: float
    query: str
    title: str
    path: str
    category: str


def draw_goal(catalogue: Catalogue, seed: int, split: Split | None, kind: GoalKind) -> Goal:
    """Return the goal of `seed` under the strict rules, the same in every process.

    Raises:
        OptionError: The split has no goals of this kind.
    """
    numbers = catalogue.goals(split, human=kind == "human")
    if not len(numbers):
        raise OptionError("split", f"the catalogue has no {kind} goals of split {split or 'any'}; choose another one")
    chance = Random(stable_hash("WebShop goal", seed)).random  # other methods may differ between Python versions
    product = catalogue.product(int(numbers[int(chance() * len(numbers))]))
    price = charged_price(product, seed)
    above = _above(price)
    first = int(chance() * len(above)) if above else 0
    second = int(chance() * (len(above) - 1)) if above else 0
    cap = max(above[first], above[second + (second >= first)]) if len(above) > 1 else NO_CAP
    if kind == "human":
        chosen = product.human_goals[int(chance() * len(product.human_goals))]
        names = {value: name for name, values in product.choices.items() for value in values}
        options = {names[value]: value for value in chosen.options}
        return _goal(product, chosen.text.strip(". "), chosen.attributes, options, cap)
    options = {name: values[int(chance() * len(values))] for name, values in sorted(product.choices.items())}
    return _goal(product, product.instruction + _with(options), product.instruction_attributes, options, cap)


def charged_price(product: Product, seed: int) -> float:
    """Return the price of a product in the episode of `seed`, in dollars; within its range if it has one."""
    if len(product.prices) < 2:
        return product.prices[0] if product.prices else 100.0
    low, high = product.prices[:2]
    return round(low + (high - low) * stable_hash("WebShop price", seed, product.asin) / 2**64, 2)


def original_prices(products: Iterable[Product], rng: Random) -> dict[str, float]:
    """Return the prices by product id as the original draws them, from `rng` instead of the global generator."""
    return {
        one.asin: rng.uniform(*one.prices[:2]) if len(one.prices) > 1 else one.prices[0] if one.prices else 100.0
        for one in products
    }


def original_goals(products: Iterable[Product], prices: Mapping[str, float], kind: GoalKind, rng: Random) -> list[Goal]:
    """Return all goals in the original's order, which is shuffled with the fixed seed 233.

    Synthetic goals: one for each product with an instruction and each combination of its options. Human goals: the
    instructions that people wrote. `prices` are those of `original_prices`. `rng` draws the highest prices; as in the
    original, it should be the generator that has drawn the prices.
    """
    goals: list[Goal] = []
    for product in products:
        if kind == "synthetic" and product.instruction and product.instruction_attributes:
            cap = _original_cap(prices[product.asin], rng)
            names = sorted(product.options)
            for values in itertools.product(*(product.options[name] for name in names)):
                options = dict(zip(names, values, strict=True))
                text = product.instruction + _with(options)
                goals.append(_goal(product, text, product.instruction_attributes, options, cap))
        elif kind == "human":
            for one in product.human:
                if one.attributes:
                    cap = _original_cap(prices[product.asin], rng)
                    goals.append(_goal(product, one.text.strip("."), one.attributes, one.options, cap))
    Random(233).shuffle(goals)
    return goals


def weights(goals: Sequence[Goal]) -> list[float]:
    """Return the weights with which the original draws its synthetic goals: rare attributes weigh more."""
    counts = Counter(attribute for goal in goals for attribute in goal.attributes)
    return [math.fsum(1 / counts[one] for one in goal.attributes) / len(goal.attributes) for goal in goals]


def _original_cap(price: float, rng: Random) -> float:
    above = _above(price)
    return max(rng.sample(above, 2)) if len(above) > 1 else NO_CAP


def _above(price: float) -> list[float]:
    """Return the next four multiples of ten dollars above a price, up to 990."""
    return [10.0 * tens for tens in range(1, 100) if 10.0 * tens > price][:4]


def _with(options: Mapping[str, str]) -> str:
    return " with " + ", and ".join(f"{name}: {value}" for name, value in options.items()) if options else ""


def _goal(
    product: Product,
    text: str,
    attributes: tuple[str, ...],
    options: Mapping[str, str] | tuple[str, ...],
    cap: float,
) -> Goal:
    price = f", and price lower than {cap:.2f} dollars" if cap < NO_CAP else ""
    of_product = (product.query, product.title, product.path, product.category)
    return Goal(product.asin, text + price, attributes, options, cap, *of_product)
