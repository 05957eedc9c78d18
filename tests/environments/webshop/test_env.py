"""The environment: episodes, options, odd actions, and the same shop in every process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from envkit.environments.webshop import WebShop
from envkit.environments.webshop.catalogue.generate import generate
from envkit.environments.webshop.catalogue.store import open_catalogue, write_catalogue
from envkit.environments.webshop.goals import draw_goal
from envkit.environments.webshop.rewards import StrictRules
from envkit.errors import OptionError, StepOrderError
from envkit.types import stable_hash

PRODUCTS = 400
GOLDEN = "77444a248e773c2"
"""Hash of the pages of 150 episodes. If it changes, so does every recorded episode: then raise `rules.VERSION`."""


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A catalogue of 400 generated products."""
    made = tmp_path_factory.mktemp("shop")
    write_catalogue(made, generate(PRODUCTS, 0), source="generated", announce=lambda line: None)
    return made


@pytest.fixture
def shop(folder: Path) -> WebShop:
    return WebShop(data={"webshop": folder})


def begin(shop: WebShop, seed: int = 0, **options: Any) -> tuple[str, dict[str, Any]]:
    return shop.reset(seed=seed, options=options)


def buy(shop: WebShop, seed: int, *, with_options: bool = True, **options: Any) -> dict[str, Any]:
    """Buy the product of a goal, and return the last info."""
    begin(shop, seed, **options)
    session = shop._session
    assert session is not None
    goal = session.goal
    session.act(f"search[{goal.title}]")
    while goal.asin.lower() not in session.clickables():
        session.act("click[next >]")
    shop.step(f"click[{goal.asin}]")
    assert isinstance(goal.options, dict)
    for value in goal.options.values() if with_options else ():
        shop.step(f"click[{value}]")
    *_, info = shop.step("<answer>click[Buy Now]</answer>")
    return info


def test_a_purchase_of_the_goal_succeeds_and_all_three_readings_are_reported(shop: WebShop) -> None:
    for seed in range(12):
        info = buy(shop, seed, max_turns=100)
        assert (info["bought"], info["score"], info["success"]) == (True, 1.0, True)
    partial = [buy(shop, seed, with_options=False, max_turns=100) for seed in range(12)]
    assert any(info["bought"] and 0 < info["score"] < 1 and not info["success"] for info in partial)


@pytest.mark.parametrize("goals", ["synthetic", "human"])
def test_every_goal_can_be_bought_by_clicks_and_scores_one(shop: WebShop, goals: str) -> None:
    for seed in range(250):
        begin(shop, seed, goals=goals)
        session = shop._session
        assert session is not None
        number = session.catalogue.number_of(session.goal.asin)
        assert number is not None
        session.page, session.product = "item", session.catalogue.product(number)
        assert isinstance(session.goal.options, dict)
        assert all(session.act(f"click[{value}]") for value in session.goal.options.values())
        *_, info = shop.step("click[buy now]")
        assert info["score"] == 1.0, session.goal


def test_only_products_of_the_goals_search_score_one(folder: Path) -> None:
    catalogue = open_catalogue(folder)
    ones = 0
    for seed in range(40):
        goal, rules = draw_goal(catalogue, seed, None, "synthetic"), StrictRules(seed)
        assert isinstance(goal.options, dict)
        for number in catalogue.search(goal.instruction):
            product = catalogue.product(number)
            if rules.score(goal, product, goal.options).total == 1.0:
                ones += 1
                assert product.query == goal.query
    assert ones > 40


@pytest.mark.parametrize("rules", ["strict", "parity"])
def test_splits_share_no_product(shop: WebShop, rules: str) -> None:
    found: dict[str, set[str]] = {}
    for split in ("train", "validation", "eval"):
        for seed in range(100):
            begin(shop, seed, split=split, rules=rules)
            assert shop._session is not None
            found.setdefault(split, set()).add(shop._session.goal.asin)
    assert all(found.values())
    assert (
        not found["train"] & found["eval"] | found["train"] & found["validation"] | found["eval"] & found["validation"]
    )


def test_the_goals_prices_and_pages_of_a_seed_never_change(shop: WebShop) -> None:
    found = 0
    for seed in range(150):
        text, info = begin(shop, seed)
        texts = [text]
        for move in (0, -1, -1):
            moves = info["legal_moves"]
            assert isinstance(moves, list)
            text, *_, info = shop.step(str(moves[move]))
            texts.append(text)
            if not info["legal_moves"]:
                break
        found = stable_hash(found, *texts)
    assert f"{found:x}" == GOLDEN


def test_an_action_that_the_page_does_not_offer_is_answered_with_a_notice(shop: WebShop) -> None:
    first, _ = begin(shop)
    text, reward, terminated, truncated, info = shop.step("Buy it " * 100)
    assert text.startswith("Nothing happened: the page does not offer 'Buy it Buy it ")
    assert text.endswith(first.partition("WebShop")[2])
    assert (reward, terminated, truncated, info["action_is_valid"]) == (0.0, False, False, False)


def test_episodes_end_after_the_last_turn_and_after_a_purchase(shop: WebShop) -> None:
    begin(shop, max_turns=2)
    assert shop.step("x")[2:4] == (False, False)
    assert shop.step("x")[2:4] == (False, True)
    with pytest.raises(StepOrderError):
        shop.step("x")
    begin(shop, rules="parity")
    for _ in range(20):
        assert shop.step("x")[2:4] == (False, False)


def test_parity_goals_can_be_chosen_by_index(shop: WebShop) -> None:
    texts = {begin(shop, seed, rules="parity", goal=3)[0] for seed in range(3)}
    assert len(texts) == 1
    assert len({begin(shop, seed, rules="parity")[0] for seed in range(20)}) > 10
    with pytest.raises(OptionError, match=r"goal: the catalogue has \d+ goals; use at most \d+"):
        begin(shop, 0, rules="parity", goal=1 << 20)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rules": "lax"}, "rules: 'lax' is not a known value"),
        ({"observation": "image"}, "observation"),
        ({"catalogue": "webshop-1m"}, "catalogue"),
        ({"goal": 1}, "goal: only for rules='parity' and goals of any split; leave it out"),
        ({"rules": "parity", "observation": "compact"}, "observation: compact pages are only for rules='strict'"),
        ({"rules": "parity", "split": "eval", "goal": 1}, "goal: only for rules='parity' and goals of any split"),
        ({"max_turns": 0}, "max_turns"),
        ({"turns": 3}, "turns: no such option"),
    ],
)
def test_wrong_options_are_named(folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        WebShop(data={"webshop": folder}, **options)


def test_the_reset_tells_the_versions_of_rules_and_catalogue(shop: WebShop, folder: Path) -> None:
    _, info = begin(shop)
    assert info["versions"] == {"rules": "strict 1", "catalogue": open_catalogue(folder).digest}
