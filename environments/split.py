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


def split_by_share(level: str, held_out: float) -> Split:
    """Return the split of `level` where validation and eval each hold the share `held_out`, in (0, 0.5), of all levels.

    It is another division than that of `split_of`.
    """
    place = stable_hash("split by share", level) / 2**64
    if place >= 1 - held_out:
        return "eval"
    return "validation" if place >= 1 - 2 * held_out else "train"
