"""The shop beside the original: scores, searches and episodes that the original's own code computed.

The recordings in ``reference/`` were made with princeton-nlp/WebShop and Lucene on a catalogue of 1,000 products that
was generated for this purpose and is beside them. Nouns come from a tagger by lists, which `nouns` repeats.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from envkit.environments.webshop import pages
from envkit.environments.webshop.catalogue.loaders import read_products
from envkit.environments.webshop.catalogue.store import Catalogue, open_catalogue, write_catalogue
from envkit.environments.webshop.goals import NO_CAP, Goal, original_goals, original_prices, weights
from envkit.environments.webshop.products import Product
from envkit.environments.webshop.rewards import OriginalRules, nouns, original_score
from envkit.environments.webshop.session import Session

REFERENCE = Path(__file__).with_name("reference")
Row = Mapping[str, Any]


def recorded(name: str) -> list[Row]:
    return [json.loads(line) for line in gzip.decompress((REFERENCE / f"{name}.jsonl.gz").read_bytes()).splitlines()]


@pytest.fixture(scope="module")
def products() -> Sequence[Product]:
    return list(read_products(REFERENCE, []))


@pytest.fixture(scope="module")
def catalogue(products: Sequence[Product], tmp_path_factory: pytest.TempPathFactory) -> Catalogue:
    folder = tmp_path_factory.mktemp("catalogue")
    write_catalogue(folder, products, source="recorded", announce=lambda _: None)
    return open_catalogue(folder)


def goal_of(row: Row) -> Goal:
    options = row["goal_options"]
    return Goal(
        asin=row["asin"],
        instruction=row.get("instruction_text", ""),
        attributes=tuple(row["attributes"]),
        options=options if isinstance(options, dict) else tuple(options),
        cap=row.get("price_upper", NO_CAP),
        query=row["query"],
        title=row["name"],
        path=row["product_category"],
        category=row["category"],
    )


def test_scores_of_purchases_are_equal() -> None:
    for row in recorded("rewards"):
        bought, expected = row["product"], row["expect"]
        product = Product(
            asin=bought["asin"],
            title=bought["Title"],
            query=bought["query"],
            category="",
            path=bought["product_category"],
            description=bought["Description"],
            bullets=tuple(bought["BulletPoints"]),
            attributes=tuple(bought["Attributes"]),
        )
        sides = row["nouns"]["goal"], row["nouns"]["product"]
        score = original_score(goal_of(row["goal"]), product, row["options"], row["price"], sides)
        found = {
            "reward": score.total,
            "r_type": score.type,
            "title_score": score.title,
            "query_match": score.same_query,
            "category_match": score.same_category,
            "r_price": score.price,
            "r_att": score.attributes / len(row["goal"]["attributes"]),
            "r_option": score.options / max(1, len(row["goal"]["goal_options"])),
        }
        assert {name: found[name] for name in expected if name in found} == pytest.approx(
            {name: expected[name] for name in expected if name in found}, rel=1e-9
        )


def test_searches_find_the_same_products_in_the_same_order(catalogue: Catalogue) -> None:
    for row in recorded("searches"):
        found = [catalogue.product(number).asin for number in catalogue.search(row["query"], 50)]
        assert found == [asin for asin, _ in row.get("hits", ())], row["query"]


def test_episodes_show_the_same_pages_and_earn_the_same_rewards(
    catalogue: Catalogue, products: Sequence[Product]
) -> None:
    rules = OriginalRules(original_prices(products, Random(0)))

    def shown(session: Session) -> Row:
        return {
            "text": pages.text(session),
            "text_rich": pages.rich_text(session),
            "available": {"has_search_bar": session.page == "search", "clickables": session.clickables()},
        }

    for row in recorded("episodes"):
        session = Session(catalogue, goal_of(row["goal"]), rules)
        assert {key: row["reset"][key] for key in ("text", "text_rich", "available")} == shown(session)
        for step in row["steps"]:
            if "raises" in step:  # a search that the original's server does not survive
                break
            session.act(step["action"])
            assert {key: step[key] for key in ("text", "text_rich", "available")} == shown(session)
            assert (session.score.total if session.score else 0.0) == pytest.approx(step["reward"], rel=1e-9)
            assert (session.page == "done") == step["done"]


def test_goals_and_their_weights_are_equal(products: Sequence[Product]) -> None:
    rng = Random(0)
    prices = original_prices(products, rng)
    assert prices["B0WRKT0OSP"] == 40.774311505973756  # drawn from a range
    goals = original_goals(products, prices, "synthetic", rng)
    assert len(goals) == 1773
    shares = weights(goals)
    for row in recorded("goals"):
        assert goals[row["index"]] == goal_of(row)
        assert shares[row["index"]] == pytest.approx(row["weight"])


def test_our_tagger_finds_the_recorded_nouns() -> None:
    for row in recorded("rewards"):
        for side in ("goal", "product"):
            assert list(nouns(row[side]["name"])) == row["nouns"][side]
