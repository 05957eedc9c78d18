"""Text for a terminal: that of agents, endpoints, servers and files made safe, and numbers of things."""

from __future__ import annotations

import unicodedata


def printable(text: str) -> str:
    """Return `text` with control characters escaped, except newline and tab, so that it cannot control a terminal.

    Characters of text direction and other invisible ones are escaped, too.
    """
    return text if text.isprintable() else "".join(map(_visible, text))


def counted(number: int, noun: str) -> str:
    """Return a number of things, such as ``1 episode`` or ``4,096 episodes``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _visible(character: str) -> str:
    if character in "\n\t" or character.isprintable() or unicodedata.category(character) == "Zs":
        return character
    return character.encode("unicode_escape").decode()
