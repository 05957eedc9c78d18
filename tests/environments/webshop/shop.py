"""A small shop for tests: a catalogue in memory, and an environment with the same products."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from envkit.environments.webshop import WebShop
from envkit.environments.webshop.catalogue.store import Catalogue, write_catalogue
from envkit.environments.webshop.goals import Goal, original_goals, original_prices
from envkit.environments.webshop.products import Product
from envkit.environments.webshop.rewards import OriginalRules, StrictRules
from envkit.environments.webshop.session import Session
from envkit.types import JSON

LAMP = Product(
    "B0LAMP0001",
    "Lumo Dimmable Desk Lamp with Wooden Base, 3 Brightness Levels & <Warm> Light for Reading",
    "desk lamps",
    "garden",
    "Home › Lighting › Lamps",
    'A lamp for long evenings.\nIts arm turns by 270 degrees, and the base holds a "wireless" charger.',
    ("DIMMABLE: soft light at night", "", "WOODEN BASE: oak & <beech>"),
    (42.5,),
    {"color": ("black", 'oak | "natural"', "sage green"), "size": ("small", "large")},
    ("dimmable", "wooden base"),
    "Find me dimmable desk lamps with a wooden base",
    ("dimmable", "wooden base"),
)
_ROOMS = ("Bedroom", "Office", "Hallway", "Studio", "Nursery", "Kitchen")
PRODUCTS = [
    LAMP,
    *(
        Product(
            f"B0LAMP01{number:02}",
            f"{_ROOMS[number % len(_ROOMS)]} Table Lamp No. {number} with Linen Shade and Brass Switch",
            "table lamps",
            "garden",
            "Home › Lighting › Lamps",
            prices=(12.9 + number, 19.0 + 2 * number) if number % 3 else (),
        )
        for number in range(23)
    ),
]


class SmallCatalogue(Catalogue):
    """A catalogue whose search finds everything, or nothing if the query is ``nothing``."""

    digest = "small"

    def __init__(self, products: Sequence[Product] = ()) -> None:
        self._products = products or PRODUCTS
        self.product = lru_cache(lambda number: self._products[number])

    def number_of(self, asin: str) -> int | None:
        return next((number for number, one in enumerate(self._products) if one.asin == asin), None)

    def search(self, query: str, limit: int = 50) -> Sequence[int]:
        return range(0 if query == "nothing" else min(limit, len(self._products)))


def goal() -> Goal:
    """Return the goal of a large black lamp."""
    rng = random.Random(0)
    goals = original_goals(PRODUCTS, original_prices(PRODUCTS, rng), "synthetic", rng)
    return next(one for one in goals if one.options == {"color": "black", "size": "large"})


def open_session(*, is_strict: bool = True) -> Session:
    rules = StrictRules(7) if is_strict else OriginalRules(original_prices(PRODUCTS, random.Random(0)))
    return Session(SmallCatalogue(), goal(), rules)


def make_shop(folder: Path, **options: JSON) -> WebShop:
    """Return the environment with the same products, in the empty `folder`; all its goals are for the desk lamp."""
    write_catalogue(folder, PRODUCTS, source="test", announce=lambda line: None)
    return WebShop(data={"webshop": folder}, render_mode="html", **options)
