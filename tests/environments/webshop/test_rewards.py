"""The score of a purchase by our rules; test_parity.py compares that of the original with recordings."""

from __future__ import annotations

import msgspec
import pytest

from envkit.environments.webshop.goals import Goal
from envkit.environments.webshop.products import Product
from envkit.environments.webshop.rewards import original_score, strict_score, token_set_ratio

SHIRT = Product(
    "B0SHIRT001",
    "Karo Linen Shirt",
    "shirts",
    "fashion",
    "Fashion › Men › Shirts",
    description="Wash by hand.",
    bullets=("SLIM FIT: yes",),
    options={"color": ("red",), "size": ("large", "x-large")},
    attributes=("machine wash",),
)


def goal(
    options: dict[str, str] | None = None, attributes: tuple[str, ...] = ("machine wash",), title: str = SHIRT.title
) -> Goal:
    return Goal("B0SHIRT001", "", attributes, options or {}, 20.0, "shirts", title, SHIRT.path, "fashion")


def test_our_rules_match_options_by_name() -> None:
    wanted = goal({"color": "red", "size": "large"})
    assert strict_score(wanted, SHIRT, {"color": "red", "size": "x-large"}, 10.0).total == pytest.approx(3 / 4)
    assert strict_score(wanted, SHIRT, {"color": "large", "size": "red"}, 10.0).total == pytest.approx(2 / 4)


def test_by_our_rules_a_product_of_another_search_earns_at_most_half() -> None:
    rug = msgspec.structs.replace(SHIRT, asin="B0RUG00001", query="rugs", options={})
    assert original_score(goal(), rug, {}, 10.0).total == 1.0  # its title and its categories are the same
    assert strict_score(goal({}), rug, {}, 10.0).total == 0.5
    other = msgspec.structs.replace(SHIRT, asin="B0SHIRT002", title="Xyz")  # of the same search
    assert (original_score(goal(), other, {}, 10.0).total, strict_score(goal({}), other, {}, 10.0).total) == (0.0, 1.0)


def test_buying_what_our_goal_asks_for_scores_one_even_if_its_texts_lack_an_attribute() -> None:
    wanted = goal({"color": "red"}, ("never mentioned",), title="12")
    assert strict_score(wanted, SHIRT, {"color": "red"}, 10.0).total == 1.0
    assert original_score(wanted, SHIRT, {"color": "red"}, 10.0).total < 1.0


def test_texts_are_compared_as_sets_of_words() -> None:
    assert token_set_ratio("machine wash", "Wash (machine!) cold") == 100
    assert token_set_ratio("long sleeve", "long sleeves") == 96
    assert token_set_ratio("éclair", "clair") == 100
    assert token_set_ratio("", "x") == token_set_ratio("é", "é") == 0
    assert token_set_ratio("abc", "xyz") == 0
