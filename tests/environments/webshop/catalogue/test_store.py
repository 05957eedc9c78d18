"""Catalogues on the disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from envkit.environments.split import split_of
from envkit.environments.webshop.catalogue.store import Catalogue, open_catalogue, write_catalogue
from envkit.environments.webshop.products import Instruction, Product
from envkit.errors import UsageError

_LAMP = Product(
    "B0LAMP0001",
    "Brass Desk Lamp",
    "desk lamps",
    "garden",
    "Home › Lamps",
    "It shines.",
    ("Brass", "Dims"),
    (10.99, 25.0),
    {"color": ("brass", "black"), "size": ("small",)},
    ("easy assemble",),
    "i need a brass lamp",
    ("easy assemble",),
    (Instruction("a small lamp that dims", ("easy assemble",), ("small",)),),
)
_MUG = Product(
    "B0AMUG0002", "Mug", "mugs", "garden", "", instruction="i want a mug", instruction_attributes=("dishwasher safe",)
)
_PLAIN = Product("B0PLAIN003", "Plain Mug", "mugs", "garden", "", instruction="a mug without an attribute is no goal")


def _write(folder: Path, products: list[Product]) -> Catalogue:
    folder.mkdir()
    write_catalogue(folder, products, source="a test", announce=print)
    return open_catalogue(folder)


@pytest.fixture
def catalogue(tmp_path: Path) -> Catalogue:
    return _write(tmp_path / "shop", [_LAMP, _MUG, _PLAIN])


def test_products_are_read_as_they_were_written(catalogue: Catalogue) -> None:
    assert [catalogue.product(number) for number in range(len(catalogue))] == [_LAMP, _MUG, _PLAIN]
    with pytest.raises(IndexError):
        catalogue.product(3)


def test_products_are_found_by_their_exact_asin(catalogue: Catalogue) -> None:
    assert [catalogue.number_of(product.asin) for product in (_LAMP, _MUG, _PLAIN)] == [0, 1, 2]
    wrong = ["", "B0LAMP000", "B0LAMP00011", "B0LAMP0001\0", "b0lamp0001", "ÄÖ", "ZZZZZZZZZZ"]
    assert [catalogue.number_of(asin) for asin in wrong] == [None] * len(wrong)


def test_a_search_looks_at_title_description_first_bullet_and_options(catalogue: Catalogue) -> None:
    found = {word: list(catalogue.search(word)) for word in ("mug", "shines", "brass", "dims", "small", "lamps")}
    assert found == {"mug": [1, 2], "shines": [0], "brass": [0], "dims": [], "small": [0], "lamps": [0]}


def test_goals_are_the_products_with_an_instruction_by_split(catalogue: Catalogue) -> None:
    assert list(catalogue.goals(None)) == [0, 1]
    assert list(catalogue.goals(None, human=True)) == [0]
    assert list(catalogue.goals(split_of(_MUG.asin))) == [n for n in (0, 1) if _split(n) == split_of(_MUG.asin)]


def _split(number: int) -> str:
    return split_of((_LAMP, _MUG)[number].asin)


def test_words_are_those_of_at_least_two_products_to_train_on(tmp_path: Path) -> None:
    def products(split: str) -> Iterator[Product]:
        numbered = (Product(f"B{number:09}", f"Oak {split}{number}", "chairs", "garden", "") for number in range(1000))
        return (product for product in numbered if split_of(product.asin) == split)

    seen, unseen = products("train"), products("eval")
    common = [next(unseen), next(unseen)]
    first = msgspec.structs.replace(
        next(seen), options={"size": ("big",)}, instruction="i want oak", instruction_attributes=("oak",)
    )
    second = msgspec.structs.replace(next(seen), options={"fit": ("big",)}, attributes=("oak wood",))
    assert _write(tmp_path / "shop", [first, second, *common]).words() == ["big", "chairs", "oak", "train"]


def test_the_digest_depends_on_the_products_only(tmp_path: Path, catalogue: Catalogue) -> None:
    same = _write(tmp_path / "same", [_LAMP, _MUG, _PLAIN])
    other = _write(tmp_path / "other", [_LAMP, _PLAIN, _MUG])
    assert same is not catalogue
    assert same.digest == catalogue.digest != other.digest


def test_a_folder_without_a_catalogue_or_of_another_format_is_an_error(tmp_path: Path, catalogue: Catalogue) -> None:
    with pytest.raises(UsageError, match=r"nothing has no catalogue of products.*envkit data"):
        open_catalogue(tmp_path / "nothing")
    meta = tmp_path / "shop" / "meta.json"
    meta.write_text(meta.read_text().replace('"format": 1', '"format": 0'))
    with pytest.raises(UsageError, match=r"format 0, but this version of envkit reads format 1; delete the folder"):
        Catalogue(tmp_path / "shop")
