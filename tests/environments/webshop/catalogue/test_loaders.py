"""Products from files of the original shop and of the minimal package."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from envkit.environments.webshop.catalogue.loaders import read_products
from envkit.environments.webshop.products import Instruction, Product
from envkit.errors import UsageError

SHIRT: dict[str, Any] = {
    "asin": "B000000001",
    "name": "Test Shirt",
    "query": " Men's Shirts ",
    "category": "fashion",
    "product_category": "Clothing › Shirts",
    "full_description": "A shirt.",
    "small_description": ["Long sleeve", "Soft"],
    "pricing": "$1,010.50$2,025.00$3.00",
    "customization_options": {
        "Color": [{"value": " Navy/Red ", "image": "x.jpg"}, {"value": "White", "image": None}],
        "Size": None,
    },
    "images": ["shirt.jpg", "other.jpg"],
    "average_rating": 4.5,
    "brand": "ignored",
}
LABELS = {
    "B000000001": {
        "attributes": ["long sleeve", "machine wash"],
        "instruction": "Find me machine wash shirts",
        "instruction_attributes": ["machine wash"],
    }
}
HUMAN = {
    "B000000001": [
        {
            "asin": "B000000001",
            "instruction": "i need a navy shirt.",
            "instruction_attributes": ["long sleeve"],
            "instruction_options": ["navy | red"],
        }
    ]
}
LOADED = Product(
    asin="B000000001",
    title="Test Shirt",
    query="men's shirts",
    category="fashion",
    path="Clothing › Shirts",
    description="A shirt.",
    bullets=("Long sleeve", "Soft"),
    prices=(1010.5, 2025.0),
    options={"color": ("navy | red", "white")},
    attributes=("long sleeve", "machine wash"),
    instruction="Find me machine wash shirts",
    instruction_attributes=("machine wash",),
    human=(Instruction("i need a navy shirt.", ("long sleeve",), ("navy | red",)),),
)


def write(file: Path, value: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(value).encode()
    file.write_bytes(gzip.compress(text) if file.suffix == ".gz" else text)


def original(folder: Path, *products: dict[str, Any]) -> list[Product]:
    write(folder / "items_shuffle.json", products)
    return list(read_products(folder, []))


@pytest.mark.parametrize(
    ("products", "labels", "human"),
    [
        ("items_shuffle.json", "items_ins_v2.json", "items_human_ins.json"),
        (
            "webshop_minimal/data/small/items_shuffle_1000.json",
            "webshop_minimal/data/small/items_ins_v2_1000.json",
            "webshop_minimal/data/items_human_ins.json",
        ),
        ("webshop_items_shuffle.json.gz", "webshop_items_ins_v2.json.gz", "webshop_items_human_ins.json.gz"),
    ],
)
def test_files_of_the_original_are_found_and_cleaned(tmp_path: Path, products: str, labels: str, human: str) -> None:
    write(tmp_path / products, [SHIRT])
    write(tmp_path / labels, LABELS)
    write(tmp_path / human, HUMAN)

    assert list(read_products(tmp_path, [])) == [LOADED]
    assert list(read_products(tmp_path / products, [])) == [LOADED]


def test_a_malformed_product_is_left_out_and_listed(tmp_path: Path) -> None:
    left_out: list[str] = []
    write(tmp_path / "items_shuffle.json", [{**SHIRT, "asin": "B0"}, {**SHIRT, "name": 3}, SHIRT])
    assert [product.asin for product in read_products(tmp_path, left_out)] == ["B0", SHIRT["asin"]]
    assert [line.partition(": ")[2][:28] for line in left_out] == ["product 1: Expected `str`, g"]


def test_missing_values_of_the_original_are_empty(tmp_path: Path) -> None:
    empty = {"customization_options": "", "pricing": "", "small_description": "", "full_description": ""}

    assert original(tmp_path, {**SHIRT, **empty}) == [
        Product(
            asin="B000000001",
            title="Test Shirt",
            query="men's shirts",
            category="fashion",
            path="Clothing › Shirts",
        )
    ]


def test_repeated_and_overlong_ids_are_dropped(tmp_path: Path) -> None:
    rows = [SHIRT, {**SHIRT, "name": "Again"}, *({**SHIRT, "asin": asin} for asin in ("nan", "B0000000001", "B2"))]

    assert [(product.asin, product.title) for product in original(tmp_path, *rows)] == [
        ("B000000001", "Test Shirt"),
        ("B2", "Test Shirt"),
    ]


def test_products_are_streamed_across_chunks(tmp_path: Path) -> None:
    rows = [{**SHIRT, "asin": f"{number:010}", "full_description": "é]},{[" * 50_000} for number in range(20)]
    whole = json.dumps(rows, ensure_ascii=False, indent=1)
    (tmp_path / "items_shuffle.json").write_text(whole[:-1000], encoding="utf-8")
    products = read_products(tmp_path, [])

    assert [next(products).asin for _ in range(19)] == [f"{number:010}" for number in range(19)]
    with pytest.raises(UsageError, match=r"items_shuffle\.json: product 19: .*; is the download complete\?"):
        next(products)


def test_an_unknown_folder_lists_the_files_that_are_looked_for(tmp_path: Path) -> None:
    (tmp_path / "readme.txt").write_text("nothing")

    with pytest.raises(UsageError, match=r"no file of products; expected .*items_shuffle"):
        list(read_products(tmp_path, []))
    with pytest.raises(UsageError, match="no such file or folder"):
        list(read_products(tmp_path / "absent", []))


def test_two_files_of_products_are_not_guessed_between(tmp_path: Path) -> None:
    write(tmp_path / "items_shuffle.json", [SHIRT])
    write(tmp_path / "items_shuffle_1000.json", [SHIRT])

    with pytest.raises(UsageError, match=r"name one of .*items_shuffle\.json, .*items_shuffle_1000\.json"):
        list(read_products(tmp_path, []))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("items_shuffle.json", [{**SHIRT, "name": 3}], r"product 0: Expected `str`, got `int` - at `\$.name`"),
        ("items_shuffle.json", {"B1": SHIRT}, "expected a JSON array of products"),
        ("items_shuffle.json", [], "has no products"),
    ],
)
def test_errors_name_the_file_and_the_place(tmp_path: Path, name: str, content: Any, message: str) -> None:
    write(tmp_path / name, content)

    with pytest.raises(UsageError, match=f"{name}: {message}"):
        list(read_products(tmp_path, []))


def test_a_damaged_archive_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "items_shuffle.json.gz").write_bytes(gzip.compress(json.dumps([SHIRT]).encode())[:-20])

    with pytest.raises(UsageError, match=r"items_shuffle\.json\.gz: cannot be read"):
        list(read_products(tmp_path, []))
