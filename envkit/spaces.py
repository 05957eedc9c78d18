"""`Utf8Text`, a Gymnasium space of arbitrary text.

Gymnasium's ``Text`` space accepts only characters from a given list (by default letters and digits). A language model
may write any character.
"""

from __future__ import annotations

from typing import Any

import gymnasium

_SAMPLE_ALPHABET = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 \n.,:;!?<>/[]{}_#"
_SAMPLE_LENGTH = 64


class Utf8Text(gymnasium.Space[str]):
    """Space of all strings with at most `max_length` characters.

    Args:
        max_length: Maximum length in characters (Unicode code points).
        seed: Seed of the random generator that `sample` uses.
    """

    def __init__(self, max_length: int, *, seed: int | None = None) -> None:
        if max_length < 1:
            raise ValueError(f"max_length must be at least 1, got {max_length}")
        self.max_length = max_length
        super().__init__(dtype=str, seed=seed)

    @property
    def is_np_flattenable(self) -> bool:
        return False

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        """Return a random string of at most 64 characters, or `max_length` if that is lower."""
        if mask is not None or probability is not None:
            raise ValueError("Utf8Text.sample does not support mask and probability")
        length = int(self.np_random.integers(1, min(self.max_length, _SAMPLE_LENGTH) + 1))
        picks = self.np_random.integers(0, len(_SAMPLE_ALPHABET), length)
        return "".join(_SAMPLE_ALPHABET[pick] for pick in picks)

    def contains(self, x: object) -> bool:
        return isinstance(x, str) and len(x) <= self.max_length

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Utf8Text) and other.max_length == self.max_length

    def __hash__(self) -> int:
        return hash((type(self), self.max_length))

    def __repr__(self) -> str:
        return f"Utf8Text({self.max_length})"
