"""The pages of a session as HTML documents, with the texts of `envkit.environments.webshop.pages` in the same order."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from .pages import Element, elements
from .products import SEARCH
from .session import Session

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


def html(session: Session, answers: Mapping[str, str] | None = None) -> str:
    """Return the page that a session shows as an HTML document without scripts and other files.

    A click posts the field ``action`` to the relative address ``act``. In its value, ``{query}`` stands for the value
    of the field ``query``, in which the words of a search are typed.

    Args:
        session: The session.
        answers: What to post for each action such as ``click[buy now]``. Controls without an answer are disabled. None:
            the actions themselves are posted.
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
