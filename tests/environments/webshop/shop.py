"""A small shop for tests: a catalogue in memory, and an environment that shows its pages."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import gymnasium

from envkit.environments.webshop import pages
from envkit.environments.webshop.goals import Goal, original_goals, original_prices
from envkit.environments.webshop.html_pages import html
from envkit.environments.webshop.products import Product
from envkit.environments.webshop.rules import OriginalRules, StrictRules
from envkit.environments.webshop.session import Session
from envkit.spaces import Utf8Text

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


class SmallCatalogue:
    """A catalogue whose search finds everything, or nothing if the query is ``nothing``."""

    def product(self, number: int) -> Product:
        return PRODUCTS[number]

    def number_of(self, asin: str) -> int | None:
        return next((number for number, one in enumerate(PRODUCTS) if one.asin == asin), None)

    def search(self, query: str, limit: int = 50) -> Sequence[int]:
        return range(0 if query == "nothing" else min(limit, len(PRODUCTS)))


def goal() -> Goal:
    """Return the goal of a large black lamp."""
    rng = random.Random(0)
    goals = original_goals(PRODUCTS, original_prices(PRODUCTS, rng), "synthetic", rng)
    return next(one for one in goals if one.options == {"color": "black", "size": "large"})


def open_session(*, is_strict: bool = True) -> Session:
    rules = StrictRules(7) if is_strict else OriginalRules(original_prices(PRODUCTS, random.Random(0)))
    return Session(SmallCatalogue(), goal(), rules)


class SmallShop(gymnasium.Env[str, str]):
    """The shop under the strict rules, with the observation ``text``."""

    observation_space = action_space = Utf8Text(1 << 20)
    render_mode = "html"

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        self._session = open_session()
        return self._shown()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        is_valid = self._session.act(action)
        score = self._session.score.total if self._session.score else 0.0
        text, info = self._shown()
        info |= {"action_is_valid": is_valid, "success": score == 1.0}
        return text, score, self._session.page == "done", False, info

    def render(self) -> Any:
        return html(self._session)

    def _shown(self) -> tuple[str, dict[str, Any]]:
        moves = [f"click[{label}]" for label in self._session.clickables() if label != "search"]
        return pages.text(self._session), {"legal_moves": moves}
