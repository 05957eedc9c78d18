"""The shop's state machine and its pages, under the original's rules and under ours."""

from __future__ import annotations

import random
import re

import msgspec
import pytest

from envkit.environments.webshop import pages
from envkit.environments.webshop.goals import Goal, original_goals, original_prices
from envkit.environments.webshop.products import Instruction, Product
from envkit.environments.webshop.rewards import OriginalRules, StrictRules
from envkit.environments.webshop.session import Session, _original_action
from tests.environments.webshop.shop import SmallCatalogue

LAMP = Product(
    "B0LAMP0001",
    "Lumo Desk Lamp",
    "lamps",
    "garden",
    "Home › Lighting › Lamps",
    bullets=("DIMMABLE: soft light", ""),
    prices=(12.9,),
    options={"color": ("red", 'black | "white"'), "size": ("small", "large")},
    attributes=("dimmable",),
    instruction="Find me dimmable lamps",
    instruction_attributes=("dimmable",),
)
LAMPS = [
    LAMP,
    *(
        Product(f"B0LAMP01{n:02}", f"Lamp {n}", "lamps", "garden", "Home › Lighting", prices=(5.0, 9.0))
        for n in range(23)
    ),
]


def goal() -> Goal:
    rng = random.Random(0)
    goals = original_goals(LAMPS, original_prices(LAMPS, rng), "synthetic", rng)
    return next(one for one in goals if one.options == {"color": "red", "size": "large"})


def original() -> Session:
    return Session(SmallCatalogue(LAMPS), goal(), OriginalRules(original_prices(LAMPS, random.Random(0))))


def strict() -> Session:
    return Session(SmallCatalogue(LAMPS), goal(), StrictRules(7))


def act(session: Session, *actions: str) -> list[bool]:
    return [session.act(action) for action in actions]


def test_every_button_leads_where_it_says() -> None:
    session = original()
    act(session, "search[lamp]", "click[next >]", "click[next >]", "click[next >]")
    assert (session.number, len(session.shown), session.clickables()) == (4, 0, ["back to search", "< prev", "next >"])
    act(session, "click[< prev]")
    assert (session.number, len(session.shown)) == (3, 4)
    act(session, "click[< prev]", "click[b0lamp0109]", "click[description]")
    assert session.detail == "Description"
    act(session, "click[< prev]")
    assert session.page == "item"
    act(session, "click[< prev]")
    assert (session.page, session.number) == ("results", 2)
    assert "[clicked button] B0LAMP0109 [clicked button_]" in pages.rich_text(session)
    act(session, "click[back to search]", "search[lamp]", "click[next >]")
    assert "clicked" not in pages.rich_text(session)


def test_options_are_lost_with_a_new_search_and_overwritten_by_a_new_value() -> None:
    session = original()
    act(session, "search[lamp]", "click[b0lamp0001]", "click[small]", "click[large]")
    assert session.options == {"size": "large"}
    act(session, "click[< prev]", "click[b0lamp0001]")
    assert session.options == {}


@pytest.mark.parametrize(
    "action",
    ["", "buy now", "click[]", "click[search]", "click[nothing]", "think[x]", "search[]", " click[red]", "Click[red]"],
)
def test_the_original_ignores_other_actions(action: str) -> None:
    session = original()
    act(session, "search[lamp]", "click[b0lamp0001]")
    before = pages.rich_text(session)
    assert not session.act(action)
    assert pages.rich_text(session) == before


def test_actions_are_found_as_the_pattern_of_the_original_finds_them() -> None:
    rng = random.Random(0)
    for _ in range(20_000):
        text = "".join(rng.choice("aB[]\n ") for _ in range(rng.randint(0, 9)))
        found = re.match(r"(.+)\[(.+)\]", text)
        assert _original_action(text) == ((found[1], found[2].lower()) if found else ("", "")), text


def test_our_rules_need_whole_actions_and_a_page_with_a_search() -> None:
    session = strict()
    assert act(session, "search[lamp] please", "search[ ]", "SEARCH[lamp]") == [False, False, True]
    assert act(session, "search[lamp]", "click[b0lamp0001]x", "click[ B0LAMP0001 ]") == [False, False, True]
    assert act(session, "click[back to search]", "search[nothing]") == [True, True]
    assert pages.text(session).endswith("Page 1 (Total results: 0) [SEP] Next >")


def test_pages_of_our_rules_show_the_price_that_is_charged() -> None:
    session = strict()
    act(session, "search[lamp]")
    tag = pages.text(session).split(" [SEP] ")[10]
    assert tag == f"${session.rules.price(LAMPS[1]):.2f}"
    assert 5 <= session.rules.price(LAMPS[1]) <= 9
    assert {StrictRules(seed).price(LAMPS[1]) for seed in range(20)} != {session.rules.price(LAMPS[1])}


def test_the_last_page_says_what_was_bought_and_its_score() -> None:
    session = strict()
    act(session, "search[lamp]", "click[b0lamp0001]", "click[red]", "click[buy now]")
    assert pages.rich_text(session) == "You have bought Lumo Desk Lamp, color: red.\nYour score, 0 to 1: 0.75\n"
    assert (session.clickables(), session.act("click[back to search]")) == ([], False)


def test_of_an_option_only_values_can_be_asked_for_that_a_click_chooses() -> None:
    options = {"size": ("small", "both"), "fit": ("both", "wide"), "note": ("description",), "empty": ()}
    assert Product("B0", "", "", "", "", options=options).choices == {"size": ("small",), "fit": ("both", "wide")}


def test_of_the_instructions_of_people_those_are_goals_that_can_be_reached() -> None:
    human = (
        Instruction("a", ("dimmable",), ("red",)),
        Instruction("no attribute", (), ("red",)),
        Instruction("no such value", ("dimmable",), ("blue",)),
    )
    assert msgspec.structs.replace(LAMP, human=human).human_goals == (human[0],)
