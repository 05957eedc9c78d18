"""Products from files that a user has: of the original shop, of the minimal package, or of GEM.

    original  ``items_shuffle*.json``, with ``items_ins_v2*.json`` and ``items_human_ins.json`` if they are there. The
              files may be compressed (``.gz``) and have the prefix ``webshop_``.
    minimal   the same files in ``webshop_minimal/data``, some of them in its subfolder ``small``.
    GEM       a table whose columns are the original loader's fields: ``webshop.db`` or ``resources/documents.jsonl``,
              which GEM's setup writes into ``.cache/webshop``, or its data set of products as ``*.jsonl``, ``*.csv`` or
              ``*.parquet``. Parquet needs the package pyarrow.

Products are cleaned as the original loader does: ids longer than ten characters and repeated ids are dropped; values of
options are in lower case, with " | " for "/". Products are streamed, the original's instructions are held in memory.
"""

from __future__ import annotations

import csv
import gzip
import importlib
import json
import re
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import IO, Any, TypeVar

import msgspec

from envkit.errors import UsageError

from ..products import Instruction, Product

_T = TypeVar("_T")

_NOT_A_SEPARATOR = re.compile(r"[^\s,]")
_CHUNK_CHARACTERS = 1 << 20
_MAX_ITEM_CHARACTERS = 32 << 20
_FOLDERS = (".", "data", "data/small", "webshop_minimal/data", "webshop_minimal/data/small", ".cache/webshop")
_PRODUCTS = re.compile(r"(webshop_)?items_shuffle(.*)\.json(\.gz)?")
_TABLES = ("webshop.db", "resources/documents.jsonl", "*.jsonl", "*.csv", "*.parquet")
_LOOKED_FOR = (
    "expected the original's items_shuffle*.json (with items_ins_v2*.json and items_human_ins.json beside it or in the"
    " folder above; .gz is fine), or GEM's webshop.db, resources/documents.jsonl, *.jsonl, *.csv or *.parquet, in the"
    f" folder or in its subfolders {', '.join(_FOLDERS[1:])}"
)
_PLACEHOLDER = "DUMMY_ATTR"
"""What the original stores for a product without attributes."""


class _Choice(msgspec.Struct):
    value: str


class _Original(msgspec.Struct):
    """A product of the original's file; other fields are ignored."""

    asin: str
    name: str
    query: str
    category: str
    product_category: str
    full_description: str | None = ""
    small_description: list[str] | str | None = None
    pricing: str | None = ""
    customization_options: dict[str, list[_Choice] | None] | str | None = None
    images: list[str | None] | None = None


class _Labels(msgspec.Struct):
    """What ``items_ins_v2*.json`` says about a product."""

    attributes: tuple[str, ...] | None = None
    instruction: str | None = None
    instruction_attributes: tuple[str, ...] | None = None


class _Human(msgspec.Struct):
    """An instruction of ``items_human_ins.json``."""

    instruction: str
    instruction_attributes: tuple[str, ...] = ()
    instruction_options: tuple[str, ...] = ()


class _Gem(msgspec.Struct):
    """A row of GEM's table; the names of its columns in lower case and without "_"."""

    asin: str
    title: str
    query: str
    category: str
    productcategory: str | None = None
    description: str | None = None
    bulletpoints: list[str] | str | None = None
    pricing: list[float] | None = None
    options: dict[str, tuple[str, ...]] | None = None
    attributes: tuple[str, ...] | None = None
    instructiontext: str | None = None
    instructionattributes: tuple[str, ...] | None = None
    mainimage: str | None = None


_JSON_COLUMNS = frozenset(("bulletpoints", "pricing", "options", "attributes", "instructionattributes"))


def read_products(folder: Path, left_out: list[str] | None = None) -> Iterator[Product]:
    """Yield the products of `folder`, or of the file of products `folder`, in the order of the file.

    Args:
        folder: The folder or file.
        left_out: Gets a line for each malformed product, which is left out; None makes such a product an error.

    Raises:
        UsageError: No file of a known layout is there, several files of products are, a file is malformed, or no
            product can be read.
    """
    files = _product_files(folder)
    read = _original_products if _PRODUCTS.fullmatch(files[0].name) else _gem_products
    seen: set[str] = set()
    for file in files:
        try:
            for product in read(file, left_out):
                if product.asin != "nan" and len(product.asin) <= 10 and product.asin not in seen:
                    seen.add(product.asin)
                    yield product
        except (OSError, EOFError, UnicodeDecodeError, csv.Error, sqlite3.Error) as error:
            raise UsageError(f"{file}: cannot be read: {error}") from error
    if not seen:
        raise UsageError(left_out[0] if left_out else f"{files[0]}: has no products")


def _product_files(folder: Path) -> list[Path]:
    """Return the file of products; more than one only if they are the parts of a table in Parquet."""
    if folder.is_file():
        if not _PRODUCTS.fullmatch(folder.name) and folder.suffix not in {".db", ".jsonl", ".csv", ".parquet"}:
            raise UsageError(f"{folder}: not a file of products; {_LOOKED_FOR}")
        return [folder]
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such file or folder; {_LOOKED_FOR}")
    places = [place for name in _FOLDERS if (place := folder / name).is_dir()]
    found = [file for place in places for file in sorted(place.iterdir()) if _PRODUCTS.fullmatch(file.name)]
    for pattern in _TABLES:
        found = found or [file for place in places for file in sorted(place.glob(pattern))]
    if not found:
        raise UsageError(f"{folder}: no file of products; {_LOOKED_FOR}")
    if len(found) > 1 and found[0].suffix != ".parquet":
        raise UsageError(f"{folder}: several files of products; name one of {', '.join(map(str, found))}")
    return found


def _original_products(file: Path, left_out: list[str] | None) -> Iterator[Product]:
    name = _PRODUCTS.fullmatch(file.name)
    assert name is not None
    labels = _instructions(file, f"items_ins_v2{name[2]}", dict[str, _Labels])
    human = _instructions(file, "items_human_ins", dict[str, tuple[_Human, ...]])
    for number, item in enumerate(_array_items(file)):
        raw = _typed(item, _Original, f"{file}: product {number}", left_out)
        if raw is None:
            continue
        label = labels.get(raw.asin, _Labels())
        bullets = raw.small_description
        yield Product(
            asin=raw.asin,
            title=raw.name,
            query=raw.query.lower().strip(),
            category=raw.category,
            path=raw.product_category,
            description=raw.full_description or "",
            bullets=tuple(bullets if isinstance(bullets, list) else [bullets or ""]) or ("",),
            prices=_prices(raw.pricing or ""),
            options=_options(raw.customization_options),
            attributes=label.attributes or (),
            instruction=label.instruction or "",
            instruction_attributes=label.instruction_attributes or (),
            human=tuple(
                Instruction(
                    text=one.instruction, attributes=one.instruction_attributes, options=one.instruction_options
                )
                for one in human.get(raw.asin, ())
            ),
            image=(raw.images or [""])[0] or "",
        )


def _prices(tag: str) -> tuple[float, ...]:
    """Return the prices in a tag such as "$10.99" or "$1,010.99$2,025.00". A part that is no number is left out."""
    digits = (re.sub(r"[^\d.]", "", part) for part in tag.split("$")[1:])
    return tuple(float(price) for price in digits if re.fullmatch(r"\d+\.?\d*|\.\d+", price))[:2]


def _options(choices: Mapping[str, list[_Choice] | None] | str | None) -> dict[str, tuple[str, ...]]:
    if not choices or isinstance(choices, str):
        return {}
    return {
        name.lower(): tuple(choice.value.strip().replace("/", " | ").lower() for choice in values)
        for name, values in choices.items()
        if values is not None
    }


def _instructions(products: Path, stem: str, kind: type[dict[str, _T]]) -> dict[str, _T]:
    """Return the content of the file `stem`, beside `products` or one folder above; empty if there is no such file."""
    for folder in (products.parent, products.parent.parent):
        for name in (f"{stem}.json", f"{stem}.json.gz", f"webshop_{stem}.json", f"webshop_{stem}.json.gz"):
            file = folder / name
            if file.is_file():
                with _open(file) as stream:
                    text = stream.read()
                try:
                    return msgspec.json.decode(text, type=kind)
                except msgspec.DecodeError as error:
                    raise UsageError(f"{file}: {error}; expected the original's file {stem}.json") from None
    return {}


def _array_items(file: Path) -> Iterator[object]:
    """Yield the items of the JSON array in `file`. In memory are one item and about 1 MiB of text."""
    decode = json.JSONDecoder().raw_decode
    with _open(file) as stream:
        text = stream.read(_CHUNK_CHARACTERS).lstrip()
        if not text.startswith("["):
            raise UsageError(f"{file}: expected a JSON array of products")
        position = 1
        count = 0
        while True:
            start = _NOT_A_SEPARATOR.search(text, position)
            position = start.start() if start else len(text)
            if text.startswith("]", position):
                return
            try:
                item, position = decode(text, position)
            except json.JSONDecodeError as error:
                more = stream.read(_CHUNK_CHARACTERS)
                if not more or len(text) - position > _MAX_ITEM_CHARACTERS:
                    raise UsageError(f"{file}: product {count}: {error.msg}; is the download complete?") from None
                text, position = text[position:] + more, 0
                continue
            yield item
            count += 1


def _open(file: Path) -> IO[str]:
    if file.suffix == ".gz":
        return gzip.open(file, "rt", encoding="utf-8-sig")
    return file.open(encoding="utf-8-sig", newline="")


def _gem_products(file: Path, left_out: list[str] | None) -> Iterator[Product]:
    rows = {".db": _database_rows, ".csv": _csv_rows, ".parquet": _parquet_rows}.get(file.suffix, _json_rows)
    for number, row in enumerate(rows(file)):
        columns: dict[str, object] = {}
        for name, value in row.items():
            column = name.lower().replace("_", "")
            is_json = column in _JSON_COLUMNS and isinstance(value, str)
            columns[column] = _json_value(value) if is_json else value
        raw = _typed(columns, _Gem, f"{file}: row {number}", left_out)
        if raw is None:
            continue
        bullets = raw.bulletpoints
        attributes = raw.attributes or ()
        yield Product(
            asin=raw.asin,
            title=raw.title,
            query=raw.query,
            category=raw.category,
            path=raw.productcategory or "",
            description=raw.description or "",
            bullets=tuple(bullets if isinstance(bullets, list) else [bullets or ""]) or ("",),
            prices=tuple(raw.pricing or ())[:2],
            options={
                name.strip().lower(): tuple(value.strip().lower() for value in values)
                for name, values in (raw.options or {}).items()
            },
            attributes=() if attributes == (_PLACEHOLDER,) else attributes,
            instruction=raw.instructiontext or "",
            instruction_attributes=raw.instructionattributes or (),
            image=raw.mainimage or "",
        )


def _json_value(text: str) -> object:
    """Return the value of a column: JSON, text that is not JSON, or None for an empty one."""
    try:
        return json.loads(text) if text else None
    except ValueError:
        return text


def _json_rows(file: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of a table, or the products of GEM's documents, which are in their field ``product``."""
    with _open(file) as stream:
        for line in stream:
            if line.strip():
                row = _json_value(line)
                yield row.get("product", row) if isinstance(row, dict) else {}


def _csv_rows(file: Path) -> Iterator[Mapping[str, Any]]:
    csv.field_size_limit(_MAX_ITEM_CHARACTERS)
    with _open(file) as stream:
        yield from csv.DictReader(stream, restkey="", restval="")


def _database_rows(file: Path) -> Iterator[Mapping[str, Any]]:
    with closing(sqlite3.connect(f"{file.resolve().as_uri()}?mode=ro", uri=True)) as connection:
        connection.row_factory = sqlite3.Row
        for row in connection.execute("SELECT * FROM all_products"):
            yield dict(row)


def _parquet_rows(file: Path) -> Iterator[Mapping[str, Any]]:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise UsageError(f"{file}: Parquet needs pyarrow: pip install pyarrow, or convert it to JSON lines") from None
    for batch in parquet.ParquetFile(file).iter_batches(batch_size=1000):
        yield from batch.to_pylist()


def _typed(value: object, kind: type[_T], place: str, left_out: list[str] | None) -> _T | None:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        problem = f"{place}: {error}; is it a file of products?"
    if left_out is None:
        raise UsageError(problem)
    left_out.append(problem)
    return None
