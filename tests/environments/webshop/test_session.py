"""The shop's state machine and its pages under our rules; test_parity.py shows those of the original."""

from __future__ import annotations

import random
import re

import msgspec

from envkit.environments.webshop import pages
from envkit.environments.webshop.products import Instruction, Product
from envkit.environments.webshop.rewards import StrictRules
from envkit.environments.webshop.session import Session, _original_action
from tests.environments.webshop.shop import LAMP, PRODUCTS, open_session


def act(session: Session, *actions: str) -> list[bool]:
    return [session.act(action) for action in actions]


def test_actions_are_found_as_the_pattern_of_the_original_finds_them() -> None:
    rng = random.Random(0)
    for _ in range(20_000):
        text = "".join(rng.choice("aB[]\n ") for _ in range(rng.randint(0, 9)))
        found = re.match(r"(.+)\[(.+)\]", text)
        assert _original_action(text) == ((found[1], found[2].lower()) if found else ("", "")), text


def test_our_rules_need_whole_actions_and_a_page_with_a_search() -> None:
    session = open_session()
    assert act(session, "search[lamp] please", "search[ ]", "SEARCH[lamp]") == [False, False, True]
    assert act(session, "search[lamp]", "click[b0lamp0001]x", "click[ B0LAMP0001 ]") == [False, False, True]
    assert act(session, "click[back to search]", "search[nothing]") == [True, True]
    assert pages.text(session).endswith("Page 1 (Total results: 0) [SEP] Next >")


def test_pages_of_our_rules_show_the_price_that_is_charged() -> None:
    session = open_session()
    act(session, "search[lamp]")
    tag = pages.text(session).split(" [SEP] ")[13]
    assert tag == f"${session.rules.price(PRODUCTS[2]):.2f}"
    assert 13.9 <= session.rules.price(PRODUCTS[2]) <= 21
    assert {StrictRules(seed).price(PRODUCTS[2]) for seed in range(20)} != {session.rules.price(PRODUCTS[2])}


def test_the_last_page_says_what_was_bought_and_its_score() -> None:
    session = open_session()
    act(session, "search[lamp]", "click[b0lamp0001]", "click[black]", "click[buy now]")
    assert pages.rich_text(session) == f"You have bought {LAMP.title}, color: black.\nYour score, 0 to 1: 0.8\n"
    assert (session.clickables(), session.act("click[back to search]")) == ([], False)


def test_of_an_option_only_values_can_be_asked_for_that_a_click_chooses() -> None:
    options = {"size": ("small", "both"), "fit": ("both", "wide"), "note": ("description",), "empty": ()}
    assert Product("B0", "", "", "", "", options=options).choices == {"size": ("small",), "fit": ("both", "wide")}


def test_of_the_instructions_of_people_those_are_goals_that_can_be_reached() -> None:
    human = (
        Instruction("a", ("dimmable",), ("black",)),
        Instruction("no attribute", (), ("black",)),
        Instruction("no such value", ("dimmable",), ("blue",)),
    )
    assert msgspec.structs.replace(LAMP, human=human).human_goals == (human[0],)
