"""A catalogue of products on the disk, which processes map into memory: they share its pages, and open it at once.

A catalogue is a folder:

- ``meta.json`` the version of this format, the number of products, where they come from, and a hash of them
- ``products.bin`` the products in MessagePack, one after another, and ``product_ends.npy`` where each ends
- ``asins.npy`` the sorted ids of the products, and ``asin_numbers.npy`` the number of the product of each
- ``goals-SPLIT.npy``, ``human_goals-SPLIT.npy`` the numbers of the products with an instruction; SPLIT may be ``all``
- ``words.txt`` the words that occur in at least two products of the training split
- ``search/`` the index; see `envkit.environments.webshop.search.index`
"""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, lru_cache
from pathlib import Path

import msgspec
import numpy as np

from envkit.errors import UsageError

from ...split import SPLITS, Split, split_of
from ..products import Product
from ..search.index import Index, map_array, map_bytes, write_index

_FORMAT = 1
_ANNOUNCED_EVERY = 10_000
_WORDS = re.compile("[a-z]+")
"""Splits text into words as the tokenizer of tiny policies does."""


class _Meta(msgspec.Struct, frozen=True):
    format: int
    count: int
    source: str
    digest: str


def write_catalogue(folder: Path, products: Iterable[Product], *, source: str, announce: Callable[[str], None]) -> None:
    """Write products, search index and meta data into the existing, empty `folder`.

    One product at a time is in memory. The meta data say where the products come from (`source`). `announce` is called
    with a line of progress every 10,000 products, and with a summary.

    Raises:
        UsageError: No product has an instruction.
    """
    ends, asins = array("q"), list[bytes]()
    numbers: dict[tuple[bool, Split | None], array[int]] = {
        (human, split): array("I") for human in (False, True) for split in (*SPLITS, None)
    }
    digest, seen, common = hashlib.sha256(), set[str](), set[str]()

    def documents() -> Iterator[tuple[str, str]]:
        with (folder / "products.bin").open("wb") as file:
            for number, product in enumerate(products):
                encoded = msgspec.msgpack.encode(product)
                file.write(encoded)
                digest.update(encoded)
                ends.append(file.tell())
                asins.append(product.asin.encode())
                split = split_of(product.asin)
                is_goal = bool(product.instruction and product.instruction_attributes)
                for human, has_goal in ((False, is_goal), (True, bool(product.human_goals))):
                    for part in (split, None) if has_goal else ():
                        numbers[human, part].append(number)
                if split == "train":
                    words = set(_WORDS.findall(_text_of(product).lower()))
                    common.update(words & seen)
                    seen.update(words)
                if len(asins) % _ANNOUNCED_EVERY == 0:
                    announce(f"{len(asins):,} products")
                yield product.asin, product.document

    (folder / "search").mkdir()
    write_index(folder / "search", documents())
    np.save(folder / "product_ends.npy", np.asarray(ends, np.int64))
    order = sorted(range(len(asins)), key=asins.__getitem__)
    np.save(folder / "asins.npy", np.array([asins[number] for number in order], "S"))
    np.save(folder / "asin_numbers.npy", np.array(order, np.uint32))
    for (human, part), chosen in numbers.items():
        np.save(folder / _goal_file(human, part), np.asarray(chosen, np.uint32))
    goals, human_goals = len(numbers[False, None]), len(numbers[True, None])
    announce(f"{len(asins):,} products, {goals:,} with an instruction, {human_goals:,} with instructions of people")
    if not (goals or human_goals):
        raise UsageError(f"{source}: no product has an instruction; those of the original are in items_ins_v2*.json")
    (folder / "words.txt").write_text("".join(f"{word}\n" for word in sorted(common)))
    meta = _Meta(_FORMAT, len(asins), source, digest.hexdigest()[:32])
    (folder / "meta.json").write_bytes(msgspec.json.format(msgspec.json.encode(meta)))


def _text_of(product: Product) -> str:
    """Return the text of a product whose words are in the vocabulary."""
    options = (word for name, values in product.options.items() for word in (name, *values))
    human = (instruction.text for instruction in product.human)
    return " ".join([product.title, product.query, product.instruction, *product.attributes, *options, *human])


def _goal_file(human: bool, split: Split | None) -> str:
    return f"{'human_goals' if human else 'goals'}-{split or 'all'}.npy"


class Catalogue:
    """A catalogue that is mapped into memory; get it from `open_catalogue`.

    Products are numbered from 0, in the order in which they were written.

    Attributes:
        digest: Hash of the products; equal for equal catalogues.
        source: Where the products come from.
        product: Function that returns the product of a number; raises `IndexError` if no product has it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        remedy = f"delete the folder and build it again with envkit data {folder.name}"
        try:
            meta = msgspec.json.decode((folder / "meta.json").read_bytes(), type=_Meta)
        except (OSError, msgspec.DecodeError) as error:
            raise UsageError(f"{folder} has no catalogue of products: {error}; {remedy}") from None
        if meta.format != _FORMAT:
            problem = f"has a catalogue of format {meta.format}, but this version of envkit reads format {_FORMAT}"
            raise UsageError(f"{folder} {problem}; {remedy}")
        self.digest, self.source, self._count = meta.digest, meta.source, meta.count
        self._blob, self._ends = map_bytes(folder / "products.bin"), map_array(folder / "product_ends.npy").data
        if len(self._blob) != (self._ends[-1] if self._count else 0):
            raise UsageError(f"{folder} is damaged; {remedy}")
        self._asins, self._asin_numbers = map_array(folder / "asins.npy"), map_array(folder / "asin_numbers.npy")
        self._goals: dict[tuple[bool, Split | None], Sequence[int]] = {
            (human, split): map_array(folder / _goal_file(human, split)).data
            for human in (False, True)
            for split in (*SPLITS, None)
        }
        self._decoder = msgspec.msgpack.Decoder(Product)
        self.product = lru_cache(maxsize=1024)(self._product)
        self._search = lru_cache(maxsize=1024)(Index(folder / "search").search)

    def __len__(self) -> int:
        return self._count

    def __reduce__(self) -> tuple[Callable[[Path], Catalogue], tuple[Path]]:
        return open_catalogue, (self._folder,)  # a copy in another process maps the same files

    def _product(self, number: int) -> Product:
        return self._decoder.decode(self._blob[self._ends[number - 1] if number else 0 : self._ends[number]])

    def number_of(self, asin: str) -> int | None:
        """Return the number of the product with this id, which is in upper case; None if no product has it."""
        wanted = asin.encode()
        place = int(np.searchsorted(self._asins, np.bytes_(wanted)))
        if place == len(self) or self._asins[place] != wanted:
            return None
        return int(self._asin_numbers[place])

    def search(self, query: str, limit: int = 50) -> Sequence[int]:
        """Return the numbers of the products that a search finds, best first and in the order of Lucene."""
        return self._search(query, limit)

    def goals(self, split: Split | None, *, human: bool = False) -> Sequence[int]:
        """Return the numbers of the products with an instruction (of people) in a split; None means all splits."""
        return self._goals[human, split]

    def words(self) -> Sequence[str]:
        """Return the sorted words that occur in at least two products of the training split.

        These are the lower-case words of titles, searches, attributes, options and instructions.
        """
        return (self._folder / "words.txt").read_text().split()


@cache
def open_catalogue(folder: Path) -> Catalogue:
    """Open the catalogue in a folder. A process opens each folder only once.

    Raises:
        UsageError: The folder has no catalogue, or one of another version of envkit.
    """
    return Catalogue(folder)
