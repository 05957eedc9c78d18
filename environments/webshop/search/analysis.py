"""Terms of a text: the analysis of Lucene's English analyzer, which the original shop uses.

Text is split at the word boundaries of Unicode (UAX #29) as Lucene 9 applies them: Chinese characters, Hiragana and
emoji are words of their own. Possessives lose their ``'s``, 33 stop words are left out, and Lucene's Porter stemmer
reduces each word to its stem.

Characters that Unicode added after version 12.1 may be split differently by different versions of Python.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator
from functools import cache, lru_cache

_STOP_WORDS = re.compile(
    "(?:a|an|and|are|as|at|be|but|by|for|if|in|into|is|it|no|not|of|on|or|such|that|the|their|then|there|these|they"
    "|this|to|was|will|with)?"
)
_APOSTROPHES = ("'", "\u2019", "\uff07")
_RARE_DOUBLES = frozenset(2 * letter for letter in "chjkqvwx")
_MEASURE = re.compile("(?:[aeiou]|(?<=[^aeiou])y)[^aeiou]")
"""A vowel and then a consonant. The letter y is a vowel after a consonant."""
_MAX_WORD = 255
"""Length at which Lucene cuts a word, in characters."""

# The kind of a character is one letter, and the rules below work on the kinds of a text's characters:
# L letter, W Hebrew letter, N digit, K Katakana, I Chinese character or Hiragana, T letter of a script without spaces
# (Thai, Khmer), E mark or format character, t mark of a script without spaces, Z joiner, V text style of an emoji,
# U underscore, M colon, B dot, C comma, S quote, D double quote, P emoji, F skin colour of an emoji, R half of a flag,
# Y sign before a keycap, X keycap, - other.
_RANGES = {
    "D": '"',
    "S": "'",
    "Y": "#*",
    "U": "_\u202f\u203f-\u2040\u2054\ufe33-\ufe34\ufe4d-\ufe4f\uff3f",
    "M": ":\u00b7\u0387\u05f4\u2027\ufe13\ufe55\uff1a",
    "B": ".\u2018-\u2019\u2024\ufe52\uff07\uff0e",
    "C": ",;\u037e\u0589\u060c-\u060d\u066c\u07f8\u2044\ufe10\ufe14\ufe50\ufe54\uff0c\uff1b",
    "Z": "\u200d",
    "V": "\ufe0e",
    "X": "\u20e3",
    "N": "\u066b",
    "F": "\U0001f3fb-\U0001f3ff",
    "R": "\U0001f1e6-\U0001f1ff",
    "K": "\u3031-\u3035\u309b-\u309c\u30a0-\u30fa\u30fc-\u30ff\u31f0-\u31ff\u32d0-\u32fe\u3300-\u3357\uff66-\uff9d"
    "\U0001b000\U0001b164-\U0001b167",
    "I": "\u2e80-\u2e99\u2e9b-\u2ef3\u2f00-\u2fd5\u3007\u3021-\u3029\u3038-\u303a\u3041-\u3096\u309d-\u309f"
    "\u3400-\u4db5\u4e00-\u9fef\uf900-\ufa6d\ufa70-\ufad9\U0001b001-\U0001b11e\U0001b150-\U0001b152\U0001f200"
    "\U00020000-\U0002a6d6\U0002a700-\U0002b734\U0002b740-\U0002b81d\U0002b820-\U0002cea1\U0002ceb0-\U0002ebe0"
    "\U0002f800-\U0002fa1d",
    "P": "\u00a9\u00ae\u203c\u2049\u2122\u2194-\u2199\u21a9-\u21aa\u231a-\u231b\u2328\u2388\u23cf\u23e9-\u23f3"
    "\u23f8-\u23fa\u25aa-\u25ab\u25b6\u25c0\u25fb-\u25fe\u2600-\u2605\u2607-\u2612\u2614-\u2685\u2690-\u2705"
    "\u2708-\u2712\u2714\u2716\u271d\u2721\u2728\u2733-\u2734\u2744\u2747\u274c\u274e\u2753-\u2755\u2757"
    "\u2763-\u2767\u2795-\u2797\u27a1\u27b0\u27bf\u2934-\u2935\u2b05-\u2b07\u2b1b-\u2b1c\u2b50\u2b55\u3030"
    "\u303d\u3297\u3299\U0001f000-\U0001f0ff\U0001f10d-\U0001f10f\U0001f12f\U0001f16c-\U0001f16f\U0001f18e"
    "\U0001f191-\U0001f19a\U0001f1ad-\U0001f1e5\U0001f201-\U0001f20f\U0001f21a\U0001f22f\U0001f232-\U0001f23a"
    "\U0001f23c-\U0001f23f\U0001f249-\U0001f3fa\U0001f400-\U0001f53d\U0001f546-\U0001f64f"
    "\U0001f680-\U0001f6ff\U0001f774-\U0001f77f\U0001f7d5-\U0001f7ff\U0001f80c-\U0001f80f"
    "\U0001f848-\U0001f84f\U0001f85a-\U0001f85f\U0001f888-\U0001f88f\U0001f8ae-\U0001f8ff"
    "\U0001f90c-\U0001f93a\U0001f93c-\U0001f945\U0001f947-\U0001fffd",
    "W": "\u05d0-\u05ea\u05ef-\u05f2\ufb1d\ufb1f-\ufb4f",
    # Exceptions from the categories below.
    "L": "\u02c2-\u02c5\u02d2-\u02d7\u02de-\u02df\u02ed\u02ef-\u02ff\u055b-\u055c\u055e\u05f3\u24b6-\u24e9"
    "\ua720-\ua721\ua789-\ua78a\uab5b\U0001f130-\U0001f149\U0001f150-\U0001f169\U0001f170-\U0001f189",
    "E": "\uff9e-\uff9f",
    "-": "\u200b\u3006",
}
_SPACELESS = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u1950-\u19df\u1a20-\u1aaf\ua9e0-\ua9ff\uaa60-\uaadf\U00011700-\U0001173f"
)
_OF_CATEGORY = {"L": "L", "Nl": "L", "Nd": "N", "M": "E", "Cf": "E"}
_OF_SPACELESS_CATEGORY = {"L": "T", "Nd": "N", "M": "t"}


class _Kinds(dict[int, str]):
    """The kinds of characters by code point, for `str.translate`; each is looked up once."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        category = unicodedata.category(character)
        of_category = _OF_SPACELESS_CATEGORY if re.match(f"[{_SPACELESS}]", character) else _OF_CATEGORY
        by_range = (kind for kind, ranges in _RANGES.items() if re.match(f"[{ranges}]", character))
        kind = next(by_range, None) or of_category.get(category) or of_category.get(category[0], "-")
        return self.setdefault(code, kind)


_KINDS = _Kinds()
# Repetitions are greedy, not possessive: Python before 3.11.5 matches possessive ones wrongly. The words are the same,
# because what follows a repetition never begins with what it repeats.
_MARKS = "[EZVXFt]*"
_LETTERS = f"(?:L+{_MARKS}|W{_MARKS}(?:D{_MARKS}(?=W)|S{_MARKS})?)"
_UNDERSCORES = f"(?:U{_MARKS})"
_RUN = (
    f"(?:{_LETTERS}(?:{_UNDERSCORES}*{_LETTERS}|[MBS]{_MARKS}(?=[LW]))*"
    f"|N{_MARKS}(?:{_UNDERSCORES}*N{_MARKS}|[CBS]{_MARKS}N{_MARKS})*)+"
)
_KATAKANA = f"K{_MARKS}(?:{_UNDERSCORES}*K{_MARKS})*"
_WORD = re.compile(
    f"{_UNDERSCORES}*(?:{_KATAKANA}|{_RUN})(?:{_UNDERSCORES}+(?:{_KATAKANA}|{_RUN}))*{_UNDERSCORES}*"
    # An emoji may consist of several that are joined. A keycap sign, such as #, is a word only with its keycap.
    f"|Z?P[EZXFt]*(?:(?<=Z)P[EZXFt]*)*|F[EZXFt]*|YE?X[EZXFt]*|R{_MARKS}R{_MARKS}"
    f"|I{_MARKS}|[Tt][TtEZVXF]*"
)


def words_of(text: str) -> Iterator[str]:
    """Yield the words of a text, as Lucene's ``StandardTokenizer``."""
    for match in _WORD.finditer(text.translate(_KINDS)):
        start, end = match.span()
        while end - start > _MAX_WORD:
            yield text[start : start + _MAX_WORD]
            start += _MAX_WORD
        yield text[start:end]


def terms_of(text: str) -> list[str]:
    """Return the terms of a text in their order, with repetitions."""
    return [term for word in words_of(text) if (term := _term_of(word))]


@lru_cache(maxsize=1 << 16)
def _term_of(word: str) -> str:
    """Return the term of a word; empty for a stop word."""
    if word[-2:-1] in _APOSTROPHES and word[-1:] in "sS":
        word = word[:-2]
    # One letter for each letter, as in Java; str.lower turns some letters into two.
    word = word.lower() if word.isascii() else "".join(letter.lower()[0] for letter in word)
    if _STOP_WORDS.fullmatch(word):
        return ""
    return word if len(word) < 3 else _porter(word)


def _porter(word: str) -> str:
    """Return the stem of a word by Porter's algorithm as Lucene has it, which differs from the published one.

    It has Porter's later rules bli to ble and logi to log, and before -ed and -ing it reduces all double consonants but
    l, s and z; the published one keeps some that are rare in English, as in ``trekking``.
    """
    stem = _stemmer()
    short = stem(word)
    if short[-2:] in _RARE_DOUBLES and word.startswith(("ed", "ing"), len(short)):
        return short[:-1]
    if word.endswith("ie"):
        return short
    if short.endswith("bli") and _MEASURE.search(short, 0, len(short) - 3):
        return stem(f"{short[:-1]}e")
    if short.endswith("logi") and _MEASURE.search(short, 0, len(short) - 4):
        return short[:-1]
    return short


@cache
def _stemmer() -> Callable[[str], str]:
    from snowballstemmer import stemmer  # type: ignore[import-untyped]  # imported late: it is slow

    stem: Callable[[str], str] = stemmer("porter").stemWord
    return stem
