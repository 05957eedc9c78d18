"""The generated catalogue of 1,000 products."""

from __future__ import annotations

import pytest

from envkit.environments.webshop.catalogue import build
from envkit.environments.webshop.catalogue.store import Catalogue, open_catalogue


@pytest.fixture(scope="module")
def catalogue(tmp_path_factory: pytest.TempPathFactory) -> Catalogue:
    folder = tmp_path_factory.mktemp("webshop-1k")
    build.webshop_1k(folder, print)
    return open_catalogue(folder)


def test_the_small_catalogue_has_a_thousand_products_and_goals_in_all_splits(catalogue: Catalogue) -> None:
    assert len(catalogue) == 1000
    sizes = [len(catalogue.goals(split)) for split in ("train", "validation", "eval")]
    assert min(sizes) > 10
    assert sum(sizes) == len(catalogue.goals(None))


def test_most_goals_are_found_by_their_title(catalogue: Catalogue) -> None:
    goals = catalogue.goals(None)
    found = sum(goal in catalogue.search(catalogue.product(goal).title) for goal in goals)
    assert found >= 0.99 * len(goals)
