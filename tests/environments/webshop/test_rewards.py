"""The score of a purchase: hand-made cases of the original's quirks, and what our rules do instead."""

from __future__ import annotations

import msgspec
import pytest

from envkit.environments.webshop.goals import NO_CAP, Goal
from envkit.environments.webshop.products import Product
from envkit.environments.webshop.rewards import nouns, original_score, strict_score, token_set_ratio

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
    options: dict[str, str] | tuple[str, ...] = (),
    attributes: tuple[str, ...] = ("machine wash",),
    *,
    title: str = SHIRT.title,
    query: str = "shirts",
    path: str = SHIRT.path,
    cap: float = 20.0,
) -> Goal:
    return Goal("B0SHIRT001", "", attributes, options, cap, query, title, path, "fashion")


def total(wanted: Goal, options: dict[str, str] | None = None, price: float = 10.0) -> float:
    return original_score(wanted, SHIRT, options or {}, price).total


def test_the_score_is_the_share_of_what_was_asked_for() -> None:
    wanted = goal(("red", "large"), ("machine wash", "slim fit", "long sleeve"))
    assert total(wanted, {"color": "red"}) == pytest.approx((2 + 1 + 1) / 6)
    assert total(wanted, {"color": "red"}, price=20.01) == pytest.approx((2 + 1 + 0) / 6)
    assert total(goal(cap=NO_CAP), price=999.0) == 1.0


def test_an_attribute_may_stand_anywhere_in_the_texts() -> None:
    assert [total(goal((), (one,))) for one in ("slim fit", "wash by hand", "linen shirt", "silk")] == [1, 1, 1, 0.5]


def test_our_rules_match_options_by_name() -> None:
    wanted = goal({"color": "red", "size": "large"})
    assert strict_score(wanted, SHIRT, {"color": "red", "size": "x-large"}, 10.0).total == pytest.approx(3 / 4)
    assert strict_score(wanted, SHIRT, {"color": "large", "size": "red"}, 10.0).total == pytest.approx(2 / 4)


@pytest.mark.parametrize(
    ("title", "query", "path", "kind"),
    [
        ("Karo Linen Shirt", "hats", "", 1.0),
        ("Karo Hat Cap Beret Hood", "hats", "", 0.5),
        ("Karo Hat Cap Beret Hood", "shirts", "", 1.0),
        ("Karo Hat Cap Beret Hood", "hats", "Men › X › Fashion", 1.0),
        ("Karo Hat Cap Beret Hood Brim Band Felt Straw Wool Bow", "shirts", "", 0.1),
        ("Felt Hat", "shirts", SHIRT.path, 0.0),
        ("12.5", "hats", "", 0.5),
    ],
)
def test_the_type_compares_titles_searches_and_categories(title: str, query: str, path: str, kind: float) -> None:
    other = goal(title=title, query=query, path=path)
    assert original_score(other, SHIRT, {}, 10.0).type == kind


def test_by_our_rules_a_product_of_another_search_earns_at_most_half() -> None:
    rug = msgspec.structs.replace(SHIRT, asin="B0RUG00001", query="rugs", options={})
    assert original_score(goal(), rug, {}, 10.0).total == 1.0  # its title and its categories are the same
    assert strict_score(goal({}), rug, {}, 10.0).total == 0.5
    other = msgspec.structs.replace(SHIRT, asin="B0SHIRT002", title="Xyz")  # of the same search
    assert (original_score(goal(), other, {}, 10.0).total, strict_score(goal({}), other, {}, 10.0).total) == (0.0, 1.0)


def test_buying_what_our_goal_asks_for_scores_one_even_if_its_texts_lack_an_attribute() -> None:
    wanted = goal({"color": "red"}, ("never mentioned",), title="12")
    assert strict_score(wanted, SHIRT, {"color": "red"}, 10.0).total == 1.0
    assert total(wanted, {"color": "red"}) < 1.0


def test_texts_are_compared_as_sets_of_words() -> None:
    assert token_set_ratio("machine wash", "Wash (machine!) cold") == 100
    assert token_set_ratio("long sleeve", "long sleeves") == 96
    assert token_set_ratio("éclair", "clair") == 100
    assert token_set_ratio("", "x") == token_set_ratio("é", "é") == 0
    assert token_set_ratio("abc", "xyz") == 0


def test_nouns_are_what_is_no_other_word() -> None:
    titled = nouns("Lumo Women's T-Shirt, Slim & Washable 24x36 2 Pack (9.5) in 4ct")
    assert titled == ("lumo", "women", "'s", "t", "shirt", "pack", "4ct")
