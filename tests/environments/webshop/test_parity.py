"""The shop beside the original: scores, searches and episodes that the original's own code computed.

The recordings in ``reference/`` were made with princeton-nlp/WebShop and Lucene on a catalogue of 1,000 products that
was generated for this purpose. Nouns come from a tagger by lists, which `nouns` repeats.
"""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest

from envkit.environments import webshop
from envkit.environments.webshop.catalogue.loaders import read_products
from envkit.environments.webshop.goals import original_goals, original_prices, weights
from envkit.environments.webshop.nouns import nouns
from envkit.environments.webshop.parity import main, read_rows

REFERENCE = Path(__file__).with_name("reference")
CATALOGUE = Path(webshop.__file__).with_name("reference")


def test_all_recorded_cases_are_equal(capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(REFERENCE / f"{name}.jsonl.gz") for name in ("rewards", "searches", "episodes", "goals")]
    assert main(files) == 0
    assert capsys.readouterr().out.splitlines() == [
        "rewards.jsonl.gz: rewards 500/500",
        "searches.jsonl.gz: searches 138/138",
        "episodes.jsonl.gz: episodes 18/18",
        "goals.jsonl.gz: goals 100/100",
    ]


def test_goals_weigh_as_much_as_in_the_original() -> None:
    products = list(read_products(CATALOGUE))
    rng = Random(0)
    goals = original_goals(products, original_prices(products, rng), "synthetic", rng)
    assert len(goals) == 1773
    shares = weights(goals)
    for row in read_rows(REFERENCE / "goals.jsonl.gz"):
        assert shares[row["index"]] == pytest.approx(row["weight"])


def test_prices_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    products = list(read_products(CATALOGUE))
    prices = original_prices(products, Random(0))
    file = tmp_path / "prices.json"
    file.write_text(json.dumps(prices))
    assert (main([str(file)]), capsys.readouterr().out) == (0, "prices.json: prices 1000/1000\n")
    assert prices["B0WRKT0OSP"] == 40.774311505973756  # drawn from a range, as recorded


def test_our_tagger_finds_the_recorded_nouns() -> None:
    for row in read_rows(REFERENCE / "rewards.jsonl.gz"):
        for side in ("goal", "product"):
            assert list(nouns(row[side]["name"])) == row["nouns"][side]
