"""Products from files that a user has: of the original shop, or of the minimal package.

    original  ``items_shuffle*.json``, with ``items_ins_v2*.json`` and ``items_human_ins.json`` if they are there. The
              files may be compressed (``.gz``) and have the prefix ``webshop_``.
    minimal   the same files in ``webshop_minimal/data``, some of them in its subfolder ``small``.

Products are cleaned as the original loader does: ids longer than ten characters and repeated ids are dropped; values of
options are in lower case, with " | " for "/". Products are streamed, the original's instructions are held in memory.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, TypeVar

import msgspec

from envkit.errors import UsageError

from ..products import Instruction, Product

_T = TypeVar("_T")

_NOT_A_SEPARATOR = re.compile(r"[^\s,]")
_CHUNK_CHARACTERS = 1 << 20
_MAX_ITEM_CHARACTERS = 32 << 20
_FOLDERS = (".", "data", "data/small", "webshop_minimal/data", "webshop_minimal/data/small")
_PRODUCTS = re.compile(r"(webshop_)?items_shuffle(.*)\.json(\.gz)?")
_LOOKED_FOR = (
    "expected the original's items_shuffle*.json (with items_ins_v2*.json and items_human_ins.json beside it or in the"
    f" folder above; .gz is fine), in the folder or in its subfolders {', '.join(_FOLDERS[1:])}"
)


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


class _Labels(msgspec.Struct):
    """An entry of ``items_ins_v2*.json``."""

    attributes: tuple[str, ...] | None = None
    instruction: str | None = None
    instruction_attributes: tuple[str, ...] | None = None


class _Human(msgspec.Struct):
    """An instruction of ``items_human_ins.json``."""

    instruction: str
    instruction_attributes: tuple[str, ...] = ()
    instruction_options: tuple[str, ...] = ()


def read_products(folder: Path, left_out: list[str]) -> Iterator[Product]:
    """Yield the products of a folder or of a file of products, in the order of the file.

    `left_out` gets a line for each malformed product, which is left out.

    Raises:
        UsageError: No file has a known layout, several files have products, a file is malformed, or no product can be
            read.
    """
    file = _product_file(folder)
    seen: set[str] = set()
    try:
        for product in _products(file, left_out):
            if product.asin != "nan" and len(product.asin) <= 10 and product.asin not in seen:
                seen.add(product.asin)
                yield product
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise UsageError(f"{file}: cannot be read: {error}") from error
    if not seen:
        raise UsageError(left_out[0] if left_out else f"{file}: has no products")


def _product_file(folder: Path) -> Path:
    if folder.is_file():
        if not _PRODUCTS.fullmatch(folder.name):
            raise UsageError(f"{folder}: not a file of products; {_LOOKED_FOR}")
        return folder
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such file or folder; {_LOOKED_FOR}")
    places = [place for name in _FOLDERS if (place := folder / name).is_dir()]
    found = [file for place in places for file in sorted(place.iterdir()) if _PRODUCTS.fullmatch(file.name)]
    if not found:
        raise UsageError(f"{folder}: no file of products; {_LOOKED_FOR}")
    if len(found) > 1:
        raise UsageError(f"{folder}: several files of products; name one of {', '.join(map(str, found))}")
    return found[0]


def _products(file: Path, left_out: list[str]) -> Iterator[Product]:
    name = _PRODUCTS.fullmatch(file.name)
    assert name is not None
    labels = _instructions(file, f"items_ins_v2{name[2]}", dict[str, _Labels])
    human = _instructions(file, "items_human_ins", dict[str, tuple[_Human, ...]])
    for number, item in enumerate(_array_items(file)):
        try:
            raw = msgspec.convert(item, _Original)
        except msgspec.ValidationError as error:
            left_out.append(f"{file}: product {number}: {error}; is it a file of products?")
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
    """Yield the items of the JSON array in `file`. Only one item and about 1 MiB of text are in memory at a time."""
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
