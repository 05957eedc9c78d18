"""An inverted index of documents, whose scores are those of Lucene's BM25 to the last bit.

The index is a folder of arrays that processes map into memory, so all that use it share its pages:

- ``terms.bin`` the sorted terms in UTF-8, one after another, and ``term_ends.npy`` where each ends
- ``posting_ends.npy`` where the postings of each term end
- ``documents.npy``, ``frequencies.npy`` the postings: document numbers, ascending per term, and occurrences
- ``norms.npy`` what Lucene derives from the length of each document, which it stores in one lossy byte
- ``ranks.npy`` the position of each document in the order of the document ids
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate
from mmap import ACCESS_READ, mmap
from os import fstat
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .analysis import terms_of

_K1, _B = np.float32(0.9), np.float32(0.4)
_ONE = np.float32(1)
_MAX_FREQUENCY = 65535


def map_array(file: Path) -> npt.NDArray[Any]:
    """Map an array of ``np.save`` into memory, read-only."""
    array: npt.NDArray[Any] = np.load(file, mmap_mode="r", allow_pickle=False)
    return array.view(np.ndarray)


def map_bytes(file: Path) -> bytes | mmap:
    """Map a file into memory, read-only."""
    with file.open("rb") as opened:
        size = fstat(opened.fileno()).st_size
        return mmap(opened.fileno(), 0, access=ACCESS_READ) if size else b""  # an empty file cannot be mapped


def write_index(folder: Path, documents: Iterable[tuple[str, str]]) -> None:
    """Write the index of pairs of id and text into an existing folder.

    Each different term of each document needs about 25 bytes of memory and 6 bytes on the disk.
    """
    numbers: dict[str, int] = {}
    ids: list[str] = []
    lengths, distinct, terms = array("I"), array("I"), array("I")
    frequencies = array("H")
    for document_id, text in documents:
        found = Counter(terms_of(text))
        ids.append(document_id)
        lengths.append(found.total())
        distinct.append(len(found))
        terms.extend(numbers.setdefault(term, len(numbers)) for term in found)
        frequencies.extend(min(count, _MAX_FREQUENCY) for count in found.values())

    words = sorted(term.encode() for term in numbers)
    (folder / "terms.bin").write_bytes(b"".join(words))
    position = np.empty(len(words), np.uint32)
    position[[numbers[word.decode()] for word in words]] = np.arange(len(words), dtype=np.uint32)
    by_posting = position[np.frombuffer(terms, np.uint32)]
    order = np.argsort(by_posting, kind="stable")
    of_document = np.repeat(np.arange(len(ids), dtype=np.uint32), np.frombuffer(distinct, np.uint32))
    ranks = np.empty(len(ids), np.uint32)
    ranks[sorted(range(len(ids)), key=ids.__getitem__)] = np.arange(len(ids), dtype=np.uint32)
    for name, values in {
        "term_ends": np.fromiter(accumulate(map(len, words)), np.int64, len(words)),
        "posting_ends": np.bincount(by_posting, minlength=len(words)).cumsum(),
        "documents": of_document[order],
        "frequencies": np.frombuffer(frequencies, np.uint16)[order],
        "norms": _norms(lengths),
        "ranks": ranks,
    }.items():
        np.save(folder / f"{name}.npy", values)


def _norms(lengths: Sequence[int]) -> npt.NDArray[np.float32]:
    """Return a factor for the term frequencies of each document; `lengths` are numbers of terms."""
    if not lengths:
        return np.empty(0, np.float32)
    average = np.float32(sum(lengths) / len(lengths))
    lossy = np.array([_lossy(length) for length in lengths], np.float32)
    return np.asarray(_ONE / (_K1 * ((_ONE - _B) + _B * lossy / average)), np.float32)


def _lossy(length: int) -> int:
    """Return a document length as Lucene's byte keeps it: exact below 40, then with four bits for what exceeds 24."""
    dropped = max(0, (length - 24).bit_length() - 4)
    return length if length < 24 else 24 + ((length - 24) >> dropped << dropped)


class Index:
    """An index that is mapped into memory, from a folder that `write_index` has filled."""

    def __init__(self, folder: Path) -> None:
        arrays = {file.stem: map_array(file) for file in folder.glob("*.npy")}
        # Single numbers are read faster from a memoryview than from an array.
        self._term_ends, self._posting_ends = arrays["term_ends"].data, arrays["posting_ends"].data
        self._documents, self._frequencies = arrays["documents"], arrays["frequencies"]
        self._norms, self._ranks = arrays["norms"], arrays["ranks"]
        self._terms = map_bytes(folder / "terms.bin")

    def __len__(self) -> int:
        return len(self._norms)

    def search(self, query: str, limit: int) -> list[int]:
        """Return the numbers of the best documents that contain a term of `query`, best first.

        Documents of equal score are in the order of their ids.
        """
        scores = np.zeros(len(self))
        for term, count in Counter(terms_of(query)).items():
            postings = self._postings(term)
            documents = self._documents[postings]
            if len(documents):
                rarity = math.log(1 + (len(self) - len(documents) + 0.5) / (len(documents) + 0.5))
                weight = np.float32(count) * np.float32(rarity)
                saturation = self._frequencies[postings].astype(np.float32) * self._norms[documents]
                scores[documents] += weight - weight / (_ONE + saturation)
        final = scores.astype(np.float32)  # Lucene adds doubles, and compares floats
        hits = np.flatnonzero(final)
        if len(hits) > limit:
            worst = np.partition(final[hits], len(hits) - limit)[len(hits) - limit]
            hits = hits[final[hits] >= worst]
        order = np.lexsort((self._ranks[hits], -final[hits]))
        return list(hits[order[:limit]].tolist())

    def _postings(self, term: str) -> slice:
        """Return where the postings of a term are; an empty slice for a term that no document contains."""
        wanted = term.encode()
        number = bisect_left(range(len(self._term_ends)), wanted, key=self._term)
        if number == len(self._term_ends) or self._term(number) != wanted:
            return slice(0, 0)
        return slice(self._posting_ends[number - 1] if number else 0, self._posting_ends[number])

    def _term(self, number: int) -> bytes:
        return self._terms[self._term_ends[number - 1] if number else 0 : self._term_ends[number]]
