"""The generated catalogue of 1,000 products."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from envkit.environments.webshop.catalogue import build
from envkit.environments.webshop.catalogue.store import Catalogue, open_catalogue


@pytest.fixture(scope="module")
def catalogue(tmp_path_factory: pytest.TempPathFactory) -> Catalogue:
    folder = tmp_path_factory.mktemp("webshop-1k")
    build.webshop_1k(folder, print)
    return open_catalogue(folder)


def test_the_small_catalogue_has_goals_in_all_splits_and_most_are_found_by_their_title(catalogue: Catalogue) -> None:
    assert len(catalogue) == 1000
    assert min(len(catalogue.goals(split)) for split in ("train", "validation", "eval")) > 10
    goals = catalogue.goals(None)
    found = sum(goal in catalogue.search(catalogue.product(goal).title) for goal in goals)
    assert found >= 0.99 * len(goals)


def test_products_that_cannot_be_read_are_counted_and_listed(tmp_path: Path) -> None:
    row = {"asin": "B1", "name": "cup", "query": "cup", "category": "home", "product_category": ""}
    (tmp_path / "items_shuffle.json").write_text(json.dumps([row, {}]))
    goal = {"attributes": ["red"], "instruction": "a red cup", "instruction_attributes": ["red"]}
    (tmp_path / "items_ins_v2.json").write_text(json.dumps({"B1": goal}))
    (tmp_path / "built").mkdir()
    lines: list[str] = []
    build.webshop_files(tmp_path / "built", lines.append, tmp_path)

    assert lines[-1] == "left out 1 product that cannot be read; left-out.txt in the data's folder lists them"
    assert (
        (tmp_path / "built/left-out.txt")
        .read_text()
        .startswith(f"{tmp_path}/items_shuffle.json: product 1: Object missing")
    )
    assert len(open_catalogue(tmp_path / "built")) == 1
