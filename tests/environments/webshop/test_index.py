"""The search index; the expected hits are those of Anserini 0.22 with Lucene 9.5, for the same documents."""

from __future__ import annotations

from pathlib import Path

import pytest

from envkit.environments.webshop.search.index import Index, write_index

_LONG = "trek boots " + "sturdy leather outdoor boot with rubber sole and steel toe cap " * 6
_DOCUMENTS = {
    "B03": "red running shoes for men, size: 9, 9.5",
    "B01": "red running shoes for men, size: 9, 9.5",
    "B07": "running shorts with a red belt",
    "B02": "women's shoes; trekking boots & hiking boots",
    "B05": f"{_LONG}end",
    "B06": f"{_LONG}trek end of line",
    "B04": "possibly the best analogies of psychology: 2.5 fl.oz, 3,500 mAh",
    "B08": "❤️ heart mug 😀 漢字 mug",
    "B09": "wi-fi router o'neill 802.11ac a_b",
}


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    folder = tmp_path_factory.mktemp("index")
    write_index(folder, _DOCUMENTS.items())
    return Index(folder)


@pytest.mark.parametrize(
    ("query", "hits"),
    [
        ("red shoes", "B01 B03 B07 B02"),  # equal scores are in the order of the ids
        ("red red red shoes 9.5", "B01 B03 B07 B02"),
        ("shoes", "B02 B01 B03"),
        ("boots", "B05 B06 B02"),  # these long documents have lengths that Lucene rounds to the same
        ("trekking boot", "B02 B06 B05"),
        ("the best analogy for psychology", "B04"),
        ("3,500", "B04"),
        ("500", ""),
        ("字", "B08"),
        ("mug mug red", "B08 B07 B01 B03"),
        ("o'neill's routers", "B09"),
        ("to be or not to be", ""),
    ],
)
def test_a_search_finds_what_lucene_finds_in_the_same_order(index: Index, query: str, hits: str) -> None:
    ids = list(_DOCUMENTS)
    assert [ids[number] for number in index.search(query, 50)] == hits.split()


def test_a_search_is_cut_after_the_best(index: Index) -> None:
    ids = list(_DOCUMENTS)
    assert [ids[number] for number in index.search("red shoes", 1)] == ["B01"]


def test_an_index_of_nothing_finds_nothing(tmp_path: Path) -> None:
    write_index(tmp_path, [])
    assert Index(tmp_path).search("shoes", 50) == []
