"""The compact mode: what its pages say, and what can be done there."""

from __future__ import annotations

from pathlib import Path

import pytest

from envkit.environments.webshop import WebShop, compact
from envkit.environments.webshop.catalogue.generate import generate
from envkit.environments.webshop.catalogue.store import write_catalogue
from envkit.environments.webshop.compact import CompactPage, read
from envkit.environments.webshop.goals import Goal
from envkit.environments.webshop.products import Product
from envkit.environments.webshop.rewards import StrictRules
from envkit.environments.webshop.session import PER_PAGE, Session
from envkit.trainer_bridge.models.tiny_policy import make_tokenizer
from tests.environments.webshop.shop import SmallCatalogue

COLORS = ("red", "light grey", "grey")
SIZES = tuple(f"{number} inch" for number in range(1, 13))
LAMP = Product(
    "B0LAMP0001",
    "Lumo Desk Lamp",
    "lamps",
    "garden",
    "Home › Lamps",
    prices=(35.0,),
    options={"color": COLORS, "size": SIZES},
    attributes=("easy clean", "dimmable", "heavy duty"),
)
DEAR_LAMP = Product("B0LAMP0002", "Floor Lamp Dimmable", "lamps", "garden", "Home › Lamps", prices=(60.0,))
WHAT = "Find me a dimmable desk lamp that is easy to clean"
TEXT = f"{WHAT} with color: grey, and size: 9 inch, and price lower than 40.00 dollars"
WANTED = "A dimmable B desk C lamp D easy E clean; color grey; size 9 inch; under 40"


def goal(asin: str = LAMP.asin, text: str = TEXT) -> Goal:
    options = {"color": "grey", "size": "9 inch"} if asin == LAMP.asin else {}
    return Goal(
        asin, text, ("dimmable", "easy clean"), options, 40.0, "lamps", "Lumo Desk Lamp", "Home › Lamps", "garden"
    )


def session(*products: Product, goal: Goal = goal()) -> Session:  # noqa: B008 - frozen
    return Session(SmallCatalogue(products or (LAMP, DEAR_LAMP)), goal, StrictRules(0))


def play(shop: Session, *numbers: str) -> str:
    """Choose numbers on the pages that follow each other, and return the text of the last page."""
    for number in numbers:
        assert shop.act(CompactPage(shop).choices[number])
    return CompactPage(shop).text


def test_the_pages_of_a_purchase_say_what_the_products_lack() -> None:
    shop = session()
    assert play(shop).splitlines() == [WANTED, "all=1", "what and values=2", "what=3"]
    assert play(shop, "2").splitlines() == [
        "what and values, page 1",
        "ok=1",
        "BDEVV$=2",
        "next=3",
        "back=4",
    ]
    assert play(shop, "1").splitlines() == [
        "ok",
        "buy=1",
        "back=2",
        "previous=3",
        "*color grey=4",
        "*size 9 inch=5",
        "color red=6",
        "color light grey=7",
        "size 1 inch=8",
        "size 2 inch=9",
    ]
    assert play(shop, "4").splitlines()[4] == "color grey chosen=4"
    assert play(shop, "5", "1") == "bought, score 1.00"
    assert not CompactPage(shop).choices


def test_choices_also_lead_to_later_results_and_back() -> None:
    shop = session(*(Product(f"B0LAMP{n:04}", f"Lamp {n}", "lamps", "garden", "", prices=(9.0,)) for n in range(12)))
    second = ["all, page 2", "ABDEVV=1", "ABDEVV=2", "next=3", "back=4", "previous=5"]
    assert play(shop, "1", "11").splitlines() == second
    assert play(shop, "2", "3").splitlines() == second, "from a product back to the page that showed it"
    assert play(shop, "5").splitlines()[0] == "all, page 1"
    assert play(shop, "12").splitlines() == [WANTED, "all=1", "what and values=2", "what=3"]


def test_pages_know_nothing_of_the_goal_but_its_instruction() -> None:
    ours, others = session(), session(goal=goal(DEAR_LAMP.asin))
    for number in (None, "1", "1", "4"):
        pages = [play(shop, *([number] if number else [])) for shop in (ours, others)]
        assert pages[0] == pages[1]


@pytest.mark.parametrize(
    ("text", "words", "value", "cap"),
    [
        (
            "i need a desk lamp in light grey, and price lower than 20.00 dollars",
            "desk lamp light grey",
            "light grey",
            "20.00",
        ),
        ("Get me lamps with usb port with color: light grey", "lamps usb port", "light grey", ""),
        ("Get me lamps with color: light", "lamps", None, ""),
        ("Get me red lamps with size: large", "red lamps", None, ""),
        ("please help me get a lamp", "lamp", None, ""),
    ],
)
def test_instructions_are_read(text: str, words: str, value: str | None, cap: str) -> None:
    request = read(text)
    assert (" ".join(request.words), request.value("color", COLORS), request.cap) == (words, value, cap)


def test_words_of_unseen_products_are_in_the_vocabulary(tmp_path: Path) -> None:
    write_catalogue(tmp_path, generate(3000, 0), source="generated", announce=lambda line: None)
    moves = [str(number) for number in range(1, 14)]
    tokenizer = make_tokenizer(compact.vocabulary(data={"webshop": tmp_path}, observation="compact"), moves)
    shop = WebShop(data={"webshop": tmp_path}, split="eval", observation="compact")
    ids: list[int] = []
    for seed in range(100):
        text, info = shop.reset(seed=seed)
        ids += tokenizer(text)["input_ids"]
        for _ in range(3):
            legal = info["legal_moves"]
            assert isinstance(legal, list)
            text, _, is_over, _, info = shop.step(str(1 + seed % len(legal)))
            ids += tokenizer(text)["input_ids"]
            if is_over:
                break
    unknown = tokenizer.convert_tokens_to_ids("<unk>")
    assert sum(one == unknown for one in ids) < 0.01 * len(ids)
    assert len(ids) < 100 * 400, "a page has at most 100 tokens on average"


def test_the_vocabulary_has_the_numbers_of_all_choices() -> None:
    lamps = [Product(f"B0LAMP1{number:03}", f"Lamp {number}", "lamps", "garden", "") for number in range(30)]
    shop = session(*lamps)
    shop.act("search[lamp]")
    shop.act("click[next >]")
    assert list(CompactPage(shop).choices) == [str(number) for number in range(1, PER_PAGE + len(compact._LABELS))]
