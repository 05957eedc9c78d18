"""Splits of the levels: train, validation and eval.

A hash of the level's content assigns it to a split: 80% train, 10% validation, 10% eval. If two seeds draw the same
level, it is thus in the same split for both, and two splits never share a level.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from envkit.types import stable_hash

Split: TypeAlias = Literal["train", "validation", "eval"]

SPLITS: tuple[Split, ...] = ("train", "validation", "eval")


def split_of(level: str) -> Split:
    """Return the split that a level belongs to. `level` is its starting board, as text."""
    tenth = stable_hash("split", level) % 10
    if tenth < 8:
        return "train"
    return "validation" if tenth == 8 else "eval"


def split_by_share(level: str, held_out: float) -> Split:
    """Return the split of the level whose text is `level`. Validation and eval each get the share `held_out` of levels.

    `held_out` is in (0, 0.5). For the same level, the result may differ from that of `split_of`.
    """
    share = stable_hash("split by share", level) / 2**64
    if share >= 1 - held_out:
        return "eval"
    return "validation" if share >= 1 - 2 * held_out else "train"
