"""The pages of a session as HTML documents, with the texts of `envkit.environments.webshop.pages` in the same order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from itertools import groupby, pairwise

from .pages import Element, elements
from .products import SEARCH
from .session import Session

_STYLE = """
:root { color-scheme: light dark; --line: light-dark(#dfe3e8, #363c45); --card: light-dark(#fff, #1d2127);
  --muted: light-dark(#5b6673, #9aa5b1); --accent: light-dark(#0b63c5, #6cb2ff); --on: light-dark(#fff, #0d1117) }
* { box-sizing: border-box }
body { margin: 0; font: 16px/1.5 system-ui, sans-serif; background: light-dark(#f4f6f8, #13161a);
  color: light-dark(#1b2127, #e4e8ec) }
form { max-width: 60rem; margin: 0 auto; padding: 1.25rem; display: grid; gap: 1rem }
h1, h2, p { margin: 0; overflow-wrap: anywhere }
h1 { font-size: 1.5rem; line-height: 1.25 } h2 { font-size: 1.1rem }
header { padding: .75rem 1rem; border-left: 4px solid var(--accent); border-radius: 4px; background: var(--card) }
header p:first-child, .label, .pairs p:nth-of-type(odd) { color: var(--muted); font-size: .875rem }
nav { display: flex; flex-wrap: wrap; gap: .5rem; align-items: center }
nav p { flex: 1; color: var(--muted); text-align: center }
button, input { font: inherit; color: inherit; padding: .4rem .9rem; border: 1px solid var(--line); border-radius: 6px;
  background: var(--card) }
button { cursor: pointer; overflow-wrap: anywhere } button:hover:enabled { border-color: var(--accent) }
:disabled { opacity: .55; cursor: default }
button:focus-visible, input:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px }
input { flex: 1; min-width: 8rem }
.search button, .buy button:last-child, .chosen { background: var(--accent); border-color: var(--accent);
  color: var(--on) }
section { padding: 1rem; border: 1px solid var(--line); border-radius: 8px; background: var(--card); display: grid;
  gap: .5rem; align-content: start }
.cards { display: grid; gap: .75rem; grid-template-columns: repeat(auto-fill, minmax(17rem, 1fr)) }
.product { justify-self: start; font: .875rem ui-monospace, monospace; color: var(--accent) }
.product.chosen { color: var(--on) }
.price { font-size: 1.15rem; font-weight: 600; align-self: end }
.item { display: grid; gap: 1rem } .about { order: -1 } .about h1 { font-size: 1.25rem }
.options { display: flex; flex-wrap: wrap; gap: .4rem }
.text { white-space: pre-line } .reward p:nth-of-type(2) { font-size: 2rem; font-weight: 700; color: var(--accent) }
.pairs { grid-template-columns: max-content 1fr; gap: .25rem 1rem } .pairs h2 { grid-column: 1 / -1 }
.note { display: flex; flex-wrap: wrap; gap: .25rem .75rem; align-items: baseline; color: var(--muted) }
@media (min-width: 42rem) { .item { grid-template-columns: 1fr 1fr } }
"""
_HEAD = f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>WebShop</title><style>{_STYLE}</style></head>
<body><form method="post" action="act" target="_top">
"""
_TAIL = "</form></body></html>\n"
_HEADINGS = {"Purchased": "pairs", "Target": "note", "Goal ": "note", "Reward": "reward"}
"""Headings of the last page, with the class of the section below."""


def html(session: Session, answers: Mapping[str, str] | None = None) -> str:
    """Return the page that a session shows as an HTML document without scripts and other files.

    A click posts the field ``action`` to the relative address ``act``. In its value, ``{query}`` stands for the value
    of the field ``query``, in which the words of a search are typed.

    Args:
        session: The session.
        answers: What to post for each action such as ``click[buy now]``, if not the action itself. Controls without
            an answer are disabled.
    """
    parts = list(elements(session))
    if session.page == "done":
        body = _receipt([part.text for part in parts])
    else:
        body = _Shop(answers).page(session.page, parts)
    return _HEAD + "\n".join(body) + _TAIL


class _Shop:
    """Writes the pages before a purchase."""

    def __init__(self, answers: Mapping[str, str] | None) -> None:
        self._answers = answers

    def page(self, name: str, parts: Sequence[Element]) -> Iterator[str]:
        if name == "search":
            title, *parts = parts
            yield _text(title.text, tag="h1")
        yield f"<header>{_text(parts[0].text)}{_text(parts[1].text)}</header>"
        parts = parts[2:]
        if name == "search":
            state = "required" if self._answers is None else "disabled"
            yield f'<nav class="search"><input name="query" aria-label="Words" autocomplete="off" {state}>'
            yield f"{self._controls(parts)}</nav>"
        elif name == "results":
            first = next((place for place, part in enumerate(parts) if part.kind == "product"), len(parts))
            yield f"<nav>{self._controls(parts[:first])}</nav>"
            if first < len(parts):
                cards = (parts[place : place + 3] for place in range(first, len(parts), 3))
                yield f'<div class="cards">{"".join(map(self._card, cards))}</div>'
        else:
            yield f"<nav>{self._controls(parts[:2])}</nav>"
            if name == "item":
                yield from self._item(parts[2:])
            elif len(parts) > 2:
                yield f"<section>{''.join(_text(part.text, 'text') for part in parts[2:])}</section>"

    def _card(self, parts: Sequence[Element]) -> str:
        product, title, price = parts
        return f"<section>{self._control(product)}{_text(title.text)}{_text(price.text, 'price')}</section>"

    def _item(self, parts: Sequence[Element]) -> Iterator[str]:
        """Yield the options, the texts about the product, and the buttons below them."""
        options, about, buttons = parts[:-7], parts[-7:-4], parts[-4:]
        yield '<div class="item">'
        if options:
            yield "<section>"
            for is_name, group in groupby(options, lambda part: part.kind == "text"):
                shown = self._controls(group)
                yield f'<div class="{"label" if is_name else "options"}">{shown}</div>'
            yield "</section>"
        title, price, rating = (part.text for part in about)
        yield f'<section class="about">{_text(title, tag="h1")}{_text(price, "price")}'
        yield f"{_text(rating, 'label')}</section>"
        yield f'</div><nav class="buy">{self._controls(buttons)}</nav>'

    def _controls(self, parts: Iterable[Element]) -> str:
        return "".join(map(self._control, parts))

    def _control(self, part: Element) -> str:
        if part.kind == "text":
            return _text(part.text)
        is_search = part.kind == "button" and part.text == SEARCH
        action = "search[{query}]" if is_search else f"click[{part.text.lower()}]"
        answer = action if self._answers is None else self._answers.get(action)
        state = ' aria-pressed="true"' if part.is_clicked else ""
        state += " disabled" if answer is None else f' value="{escape(answer)}"'
        kind = f"{part.kind} chosen" if part.is_clicked else part.kind
        return f'<button name="action" class="{kind}"{state}>{escape(part.text)}</button>'


def _receipt(texts: Sequence[str]) -> Iterator[str]:
    """Yield the page after a purchase: a section for each heading, which only the original has."""
    starts = [*(place for place, text in enumerate(texts) if text in _HEADINGS), len(texts)]
    if len(starts) == 1:
        yield f"<section>{_text(texts[0], tag='h1')}{''.join(_text(text, 'price') for text in texts[1:])}</section>"
        return
    yield f'{_text(texts[0], tag="h1")}<div class="note">{"".join(map(_text, texts[1 : starts[0]]))}</div>'
    for start, end in pairwise(starts):
        shown = "".join(map(_text, texts[start + 1 : end]))
        yield f'<section class="{_HEADINGS[texts[start]]}">{_text(texts[start], tag="h2")}{shown}</section>'


def _text(text: str, kind: str = "", *, tag: str = "p") -> str:
    return f'<{tag} class="{kind}">{escape(text)}</{tag}>' if kind else f"<{tag}>{escape(text)}</{tag}>"
