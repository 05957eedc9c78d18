"""The shop's pages as HTML documents."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import pytest

from envkit.environments.webshop import pages
from envkit.environments.webshop.pages import html
from envkit.environments.webshop.session import Session
from tests.environments.webshop.shop import LAMP, make_shop, open_session

EPISODE = (
    "search[desk lamps]",
    "click[next >]",
    "click[< prev]",
    "click[B0LAMP0001]",
    "click[black]",
    'click[oak | "natural"]',
    "click[large]",
    "click[description]",
    "click[< prev]",
    "click[features]",
    "click[< prev]",
    "click[reviews]",
    "click[back to search]",
    "search[nothing]",
    "click[back to search]",
    "search[lamps]",
    "click[B0LAMP0001]",
    "click[sage green]",
    "click[buy now]",
)


class Reader(HTMLParser):
    """Reads a document: the texts of its innermost elements in order, and its controls.

    Attributes:
        texts: The texts outside the head.
        answers: What each button posts, by its label; None if it is disabled.
        chosen: Labels of the buttons that are marked as chosen.
        links: Addresses of other documents and files.
    """

    def __init__(self, document: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.answers: dict[str, str | None] = {}
        self.chosen: set[str] = set()
        self.links: list[str | None] = []
        self._tags: list[tuple[str, dict[str, str | None]]] = []
        self._text = ""
        self.feed(document)
        self.close()
        assert not self._tags, "all elements are closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.links += [value for name, value in attrs if name in ("src", "href", "action", "srcset", "style")]
        if tag not in ("input", "meta"):
            assert not self._text.strip(), "a text stands alone in its element"
            self._tags.append((tag, found))
            self._text = ""
            self._is_inner = True

    def handle_data(self, data: str) -> None:
        self._text += data

    def handle_endtag(self, tag: str) -> None:
        name, attributes = self._tags.pop()
        assert name == tag
        if self._is_inner and not any(outer == "head" for outer, _ in self._tags):
            self.texts.append(self._text)
            if tag == "button":
                assert attributes["name"] == "action"
                self.answers[self._text] = None if "disabled" in attributes else attributes["value"]
                self.chosen |= {self._text} if attributes.get("aria-pressed") == "true" else set()
        self._text = ""
        self._is_inner = False


def read(session: Session) -> Reader:
    return Reader(html(session))


@pytest.mark.parametrize("is_strict", [True, False])
def test_each_page_has_the_texts_of_the_observation_in_the_same_order(is_strict: bool) -> None:
    session = open_session(is_strict=is_strict)
    shown = set()
    for action in (*EPISODE, ""):
        assert " [SEP] ".join(text.strip() for text in read(session).texts) == pages.text(session)
        shown.add(session.page)
        assert session.act(action) == (action != "")
    assert shown == {"search", "results", "item", "detail", "done"}


@pytest.mark.parametrize("is_strict", [True, False])
def test_each_button_posts_an_action_that_the_page_offers(is_strict: bool) -> None:
    session = open_session(is_strict=is_strict)
    for action in EPISODE:
        answers = read(session).answers
        for answer in answers.values():
            assert answer is not None
            assert session.copy().act(answer.replace("{query}", "lamps")), answer
        assert len(answers) == len(session.clickables())
        session.act(action)
    assert read(session).answers == {}


def test_chosen_values_and_opened_products_are_marked() -> None:
    session = open_session()
    for action in EPISODE[:7]:
        session.act(action)
    assert read(session).chosen == {'oak | "natural"', "large"}
    session.act("click[< prev]")
    assert read(session).chosen == {"B0LAMP0001"}


def test_a_document_links_to_nothing_but_the_address_of_its_form() -> None:
    session = open_session()
    for action in EPISODE:
        assert set(read(session).links) == {"act"}
        assert "<script" not in html(session)
        assert "url(" not in html(session)
        session.act(action)


def test_other_answers_replace_actions_and_disable_the_controls_without_one() -> None:
    session = open_session()
    for action in EPISODE[:4]:
        session.act(action)
    answers = Reader(html(session, {"click[buy now]": "7", "click[sage green]": '<"8">'})).answers
    assert {label: answer for label, answer in answers.items() if answer} == {"Buy Now": "7", "sage green": '<"8">'}
    assert len(answers) == 11


def test_in_the_compact_mode_a_button_posts_the_number_of_its_choice(tmp_path: Path) -> None:
    env = make_shop(tmp_path, observation="compact")
    env.reset(seed=2)
    assert Reader(env.render()).answers == {"Search": None}
    env.step("1")
    number = Reader(env.render()).answers[LAMP.asin]
    env.step(str(number))
    answers = Reader(env.render()).answers
    assert answers["Description"] is None
    for label in ("black", "large"):
        env.step(str(answers[label]))
        answers = Reader(env.render()).answers
    *_, info = env.step(str(answers["Buy Now"]))
    assert (info["bought"], info["success"]) == (True, True)
