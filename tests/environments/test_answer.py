"""Finding the move in what a language model wrote."""

from __future__ import annotations

import sys
from types import FrameType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envkit.environments.answer import parse_answer
from envkit.environments.board import MOVES


@pytest.mark.parametrize(
    ("text", "move"),
    [
        ("<answer>up</answer>", "up"),
        ("I go there.\n<answer>\n  Left\t</answer> Good.", "left"),
        ("<ANSWER>DOWN</Answer>", "down"),
        ("\\boxed{right}", "right"),
        ("so \\boxed{up}, no: \\BOXED{ Down }.", "down"),
        ("\\boxed{up} and \\boxed{", "up"),
    ],
)
def test_a_move_is_found_in_tags_or_in_a_box(text: str, move: str) -> None:
    assert parse_answer(text, MOVES) == move


@pytest.mark.parametrize(
    ("text", "move"),
    [
        ("<answer>up</answer><answer>down</answer>", "up"),  # the first pair counts
        ("<answer>let me think <answer>down</answer>", "down"),  # the last opening before its closing
        ("</answer><answer>left</answer>", "left"),  # a closing before any opening does not
        ("<answer>jump</answer><answer>up</answer>", None),  # even where it is not a move
        ("\\boxed{up} <answer>down</answer>", "down"),  # tags go before boxes
        ("\\boxed{up} <answer>jump</answer>", None),
        ("<answer>up \\boxed{left}", "left"),  # an opening alone is no pair
    ],
)
def test_the_choice_among_several_answers_is_the_documented_one(text: str, move: str | None) -> None:
    assert parse_answer(text, MOVES) == move


@pytest.mark.parametrize(
    "text",
    [
        "",
        "up",
        "<answer>up",
        "up</answer>",
        "</answer>up<answer>",
        "<answer></answer>",
        "<answer>u p</answer>",
        "<answer>up down</answer>",
        "<answer>up\x00</answer>",
        "<answer>\N{SNOWMAN}</answer>",
        "\\boxed{}",
        "\\boxed{up",
        "}\\boxed{",
        "\\boxed{up||down}",
    ],
)
def test_anything_else_is_no_move(text: str) -> None:
    assert parse_answer(text, MOVES) is None


def test_a_megabyte_and_a_thousand_tags_are_read_like_any_other_text() -> None:
    assert parse_answer("x" * 2**20 + "<answer>up</answer>", MOVES) == "up"
    assert parse_answer("<answer>" * 1000 + "down" + "</answer>" * 1000, MOVES) == "down"
    assert parse_answer("<answer>" * 2**17, MOVES) is None
    assert parse_answer("\\boxed{" * 2**17, MOVES) is None
    assert parse_answer("\\boxed{" * 1000 + "left}", MOVES) == "left"
    assert parse_answer("<answer>" + "up" * 2**19 + "</answer>", MOVES) is None


@pytest.mark.parametrize("piece", ["<answer>", "</answer>", "<answer>x</answer>", "\\boxed{", "\\boxed{x}", "}", "<"])
def test_the_number_of_passes_over_the_text_does_not_grow_with_what_it_holds(piece: str) -> None:
    assert _calls_to_parse(piece * 10_000) == _calls_to_parse(piece * 10) <= 8


@given(st.text(), st.sampled_from(MOVES), st.text())
def test_nothing_around_a_pair_of_tags_is_an_error(before: str, move: str, after: str) -> None:
    assert parse_answer(f"{before}<answer>{move}</answer>{after}", [*MOVES]) == move


def _calls_to_parse(text: str) -> int:
    """Count the calls that parsing makes, each of which looks at every character at most once."""
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "c_call"

    profiler = sys.getprofile()
    sys.setprofile(count)
    try:
        parse_answer(text, MOVES)
    finally:
        sys.setprofile(profiler)
    return calls
