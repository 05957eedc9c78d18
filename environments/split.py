"""Splits: which levels are for training, which for choosing, which for the final examination.

A level belongs to a split by a hash of its content: four fifths train, a tenth validation, a tenth eval. The splits
therefore share no level whatever seeds are used, and a level that two seeds draw is in the same split for both.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from envkit.types import stable_hash

Split: TypeAlias = Literal["train", "validation", "eval"]

SPLITS: tuple[Split, ...] = ("train", "validation", "eval")


def split_of(level: str) -> Split:
    """Return the split of the level whose first board is `level`."""
    tenth = stable_hash("split", level) % 10
    if tenth < 8:
        return "train"
    return "validation" if tenth == 8 else "eval"
