"""Text of agents, endpoints, servers and files, made safe for a terminal."""

from __future__ import annotations

import unicodedata


def printable(text: str) -> str:
    """Return `text` with control characters escaped, except newline and tab, so that it cannot control a terminal.

    Characters of text direction and other invisible ones are escaped, too.
    """
    return text if text.isprintable() else "".join(map(_visible, text))


def _visible(character: str) -> str:
    if character in "\n\t" or character.isprintable() or unicodedata.category(character) == "Zs":
        return character
    return character.encode("unicode_escape").decode()
