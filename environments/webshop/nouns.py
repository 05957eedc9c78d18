"""The nouns of a title, found with lists of other words: a tagger without a model, the same on every machine.

The original uses the statistical tagger of spaCy's ``en_core_web_lg``. Ours counts a word as a noun if it is in none of
the lists and has no ending of an adjective. Titles of products are little else than nouns and adjectives.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

_OTHERS = frozenset(
    """a an the and or but nor so yet for of in on at to from by with without into onto over under about as is are was
    were be been being am do does did has have had having will would can could shall should may might must this that
    these those it its i you he she we they me him her us them my your his our their what which who whom whose not no
    yes if than then when while where how all any both each few more most other some such only own same too very up down
    out off again once here there why just also per via plus & + - between during before after above below
    find buy get need want use uses used made make makes offers offer enjoy keep keeps looking fit fits wear install
    clean assemble carry
    new old big small large medium mini long short high low good great best soft hard thick thin wide narrow deep light
    dark bright hot cold warm cool fresh dry wet natural organic pure raw sweet bitter spicy slim loose tight classic
    modern vintage retro casual formal deluxe premium portable adjustable durable lightweight heavy extra upgraded
    universal compatible removable reusable washable waterproof resistant free electric digital smart wireless black
    white blue red green pink beige brown silver grey gray purple yellow navy clear multi x-large xx-large non ultra
    super full half double single dual triple professional personal everyday daily easy quick fast""".split()  # noqa: SIM905 - easier to read
)
"""Function words, verbs and adjectives that are frequent in titles."""
_ADJECTIVE_ENDINGS = ("able", "ible", "ful", "less", "ous", "ive", "ic", "ish", "proof")
_NUMBER = re.compile(r"[\d.,/%\"'x*]+")
_TOKEN = re.compile(r"[a-z]+(?='s\b)|'s|[^\W\d_]+|\d[\w.,/%\"'*]*|\w+|[^\w\s]")


@lru_cache(maxsize=1 << 14)
def nouns(title: str) -> Sequence[str]:
    """Return the nouns of a title in lower case, in their order, with repetitions."""
    return tuple(
        token
        for token in _TOKEN.findall(title.lower())
        if any(one.isascii() and one.isalnum() for one in token)
        and token not in _OTHERS
        and not (token.endswith("ly") or (len(token) > 5 and token.endswith(_ADJECTIVE_ENDINGS)))
        and not _NUMBER.fullmatch(token)
    )
