"""The pages of a session: as text, which is the original's observation, and as HTML."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from html import escape
from typing import Literal, NamedTuple

from .products import DETAILS, SEARCH
from .session import Session

_ASCII_SPACE = " \n\t\f\r"

_HEAD = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>WebShop</title><style>
:root { color-scheme: light dark }
body { margin: 0 auto; max-width: 60rem; padding: 1.25rem; font: 16px/1.5 system-ui, sans-serif }
p { margin: .4rem 0; overflow-wrap: anywhere; white-space: pre-line }
button, input { font: inherit; margin: .15rem; padding: .3rem .8rem; border: 1px solid gray; border-radius: 6px }
button.product { display: block; margin-top: 1.25rem }
button[aria-pressed] { font-weight: bold; border-color: currentColor }
</style></head>
<body><form method="post" action="act" target="_top">
"""
_TAIL = "</form></body></html>\n"


class Element(NamedTuple):
    """A visible part of a page.

    Attributes:
        text: What it shows.
        kind: ``"text"``, or what can be clicked: a button, the id of a product, or a value of an option.
        is_clicked: Whether it shows a chosen value or a product that was opened before.
    """

    text: str
    kind: Literal["text", "button", "product", "option"] = "text"
    is_clicked: bool = False


def elements(session: Session) -> Iterator[Element]:
    """Yield the visible parts of the page that a session shows, from top to bottom."""
    return (element for element in _elements(session) if element.text)


def _elements(session: Session) -> Iterator[Element]:
    if session.page == "done":
        yield from map(Element, _receipt(session))
        return
    if session.page == "search":
        yield Element("WebShop")
    yield Element("Instruction: " if session.page == "search" else "Instruction:")
    yield Element(session.goal.instruction)
    buttons = [Element(label, "button") for label in session.buttons()]
    if session.page == "search":
        yield from buttons
    elif session.page == "results":
        yield buttons[0]
        yield Element(f"Page {session.number} (Total results: {len(session.hits)})")
        yield from buttons[1:]
        for product in session.shown:
            yield Element(product.asin, "product", product.asin in session.visited)
            yield Element(product.title)
            yield Element(session.rules.price_tag(product))
    elif session.page == "item":
        yield from buttons[:2]
        yield from _item(session)
        yield from buttons[2:]
    else:
        yield from buttons
        yield from _detail(session)


def text(session: Session) -> str:
    """Return the page as the original's observation ``text``: the visible texts in one line."""
    return " [SEP] ".join(element.text.strip() for element in elements(session))


def rich_text(session: Session) -> str:
    """Return the page as the original's observation ``text_rich``: one line for each part, with marked buttons."""
    lines: list[str] = []
    for element in elements(session):
        name = "clicked button" if element.is_clicked else "button"
        if element.kind == "text":
            lines.append(element.text)
            continue
        indent = {"button": "", "product": "\n", "option": "  "}[element.kind]
        lines.append(f"{indent}[{name}] {element.text} [{name}_]")
        if element.kind == "option" and element.is_clicked:
            lines.insert(0, f"You have clicked {element.text}.")
    return "".join(f"{line}\n" for line in lines)


def _item(session: Session) -> Iterator[Element]:
    assert session.product is not None, "a page of a product"
    address = f"{'+'.join(session.keywords)}/{json.dumps(session.options)}"
    for name, values in session.product.options.items():
        yield Element(name)
        for value in values:
            # The original looks for the value in the page's address, which has the words of the search and all options.
            is_chosen = session.options.get(name) == value if session.rules.is_strict else f'"{value}"' in address
            yield Element(value, "option", is_chosen)
    yield Element(session.product.title)
    yield Element(f"Price: {session.rules.price_tag(session.product)}")
    yield Element("Rating: N.A.")


def _detail(session: Session) -> Iterator[Element]:
    assert session.product is not None, "a page of a product"
    if session.detail == DETAILS[0]:
        texts = [session.product.description]
    elif session.detail == DETAILS[1]:
        texts = [f" {bullet}" for bullet in session.product.bullets]
    else:
        texts = []
    for shown in texts:
        # The original's parser drops blank texts with a line feed, and shortens other blank texts to one space.
        if shown.strip(_ASCII_SPACE) or (shown and "\n" not in shown):
            yield Element(shown if shown.strip(_ASCII_SPACE) else " ")


def _escaped(options: Mapping[str, str]) -> str:
    """Return options as JSON that is safe in HTML, sorted, as the original's template writes them."""
    shown = json.dumps(options, sort_keys=True)
    return re.sub("[<>&']", lambda found: f"\\u{ord(found[0]):04x}", shown)


def _receipt(session: Session) -> Iterator[str]:
    """Yield the texts of the last page. In that of the original, only the purchase and the score are filled in."""
    assert session.product is not None, "it was bought"
    assert session.score is not None, "it was bought"
    if session.rules.is_strict:
        chosen = "".join(f", {name}: {value}" for name, value in session.options.items())
        yield f"You have bought {session.product.title}{chosen}."
        yield f"Your score, 0 to 1: {session.score.total:.3g}"
        return
    yield from ("Thank you for shopping with us!", "Your code: ", "None", " (Paste it in your MTurk interface.)")
    yield from ("Purchased", "asin", session.product.asin, "options", _escaped(session.options))
    yield from ("attrs", "None", "category", "None", "query", "None", "product category", "None")
    yield from ("Target", "asin", "options", "attrs", "price upper", "instuction text", "category")
    yield from ("product category", "query", "Goal ", "None", "Reward", "Your score (min 0.0, max 1.0)")
    yield from (str(session.score.total), "Reward Details ", "None")


def html(session: Session, answers: Mapping[str, str] | None = None) -> str:
    """Return the page that a session shows as an HTML document without scripts and other files.

    A click posts the field ``action`` to the relative address ``act``. In its value, ``{query}`` stands for the value
    of the field ``query``, in which the words of a search are typed. `answers` are what to post for each action such as
    ``click[buy now]``; controls without an answer are disabled. None: the actions themselves are posted.
    """
    return _HEAD + "".join(f"{_drawn(element, answers)}\n" for element in elements(session)) + _TAIL


def _drawn(element: Element, answers: Mapping[str, str] | None) -> str:
    if element.kind == "text":
        return f"<p>{escape(element.text)}</p>"
    is_search = element.kind == "button" and element.text == SEARCH
    action = "search[{query}]" if is_search else f"click[{element.text.lower()}]"
    answer = action if answers is None else answers.get(action)
    state = ' aria-pressed="true"' if element.is_clicked else ""
    state += " disabled" if answer is None else f' value="{escape(answer)}"'
    button = f'<button name="action" class="{element.kind}"{state}>{escape(element.text)}</button>'
    if not is_search:
        return button
    return f'<input name="query" aria-label="Words" autocomplete="off" {"required" if answer else "disabled"}>{button}'
