"""Parsing the move in the output of a language model."""

from __future__ import annotations

import sys
from types import FrameType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envkit.environments.answer import parse_answer, parse_answers
from envkit.environments.board import MOVES


@pytest.mark.parametrize(
    ("text", "move"),
    [
        ("<answer>up</answer>", "up"),
        ("I go there.\n<answer>\n  Left\t</answer> Good.", "left"),
        ("<ANSWER>DOWN</Answer>", "down"),
        ("\\boxed{right}", "right"),
        ("up", "up"),
        (" Down\n", "down"),
        ("so \\boxed{up}, no: \\BOXED{ Down }.", "down"),
        ("\\boxed{up} and \\boxed{", "up"),
    ],
)
def test_a_move_is_found_in_tags_in_boxed_or_alone(text: str, move: str) -> None:
    assert parse_answer(text, MOVES) == move


@pytest.mark.parametrize(
    ("text", "move"),
    [
        ("<answer>up</answer><answer>down</answer>", "up"),  # the first pair counts
        ("<answer>let me think <answer>down</answer>", "down"),  # the last opening before its closing
        ("</answer><answer>left</answer>", "left"),  # a closing before any opening does not
        ("<answer>jump</answer><answer>up</answer>", None),  # even where it is not a move
        ("\\boxed{up} <answer>down</answer>", "down"),  # tags go before \boxed
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
        "I go up",
        "up.",
        "up down",
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
        "<answer>up || down</answer>",
        "\ud800<answer>\udfff</answer>",
    ],
)
def test_anything_else_is_no_move(text: str) -> None:
    assert parse_answer(text, MOVES) is None


@pytest.mark.parametrize(
    ("text", "moves"),
    [
        ("<answer>up || left</answer>", ("up", "left")),
        ("up || left", ("up", "left")),
        ("<answer>up||left||up</answer>", ("up", "left", "up")),
        ("<answer>\n UP \n||\tLeft </answer>", ("up", "left")),
        ("\\boxed{down || down}", ("down", "down")),
        ("first \\boxed{up||up}, then \\boxed{right||left}", ("right", "left")),
        ("<answer>up || up</answer><answer>down</answer>", ("up", "up")),
        ("<answer>right</answer>", ("right",)),
    ],
)
def test_several_moves_are_found_in_their_order(text: str, moves: tuple[str, ...]) -> None:
    assert parse_answers(text, MOVES, 3) == moves


def test_moves_beyond_the_maximum_are_dropped_but_must_be_valid() -> None:
    assert parse_answers("<answer>up||left||down||right</answer>", MOVES, 2) == ("up", "left")
    assert parse_answers("<answer>up||left||down||right</answer>", MOVES, 1) == ("up",)
    assert parse_answers("<answer>up||left||down||dawn</answer>", MOVES, 2) == ()


@pytest.mark.parametrize(
    "answer",
    [
        *("", "||", "up||", "||up", "up||||left", "up|left", "up,left", "up left", "up || jump", "jump || up"),
        *("up ||| left", "up || left.", "up || \N{SNOWMAN}", "up || \x00"),
    ],
)
def test_one_invalid_part_makes_the_whole_answer_unreadable(answer: str) -> None:
    assert parse_answers(f"<answer>{answer}</answer>", MOVES, 5) == ()
    assert parse_answers(f"\\boxed{{{answer}}}", MOVES, 5) == ()


@settings(deadline=None)
@given(st.lists(st.sampled_from(MOVES), min_size=1, max_size=12), st.integers(1, 12))
def test_the_first_moves_of_any_answer_are_read(moves: list[str], most: int) -> None:
    assert parse_answers(f"<answer>{' || '.join(moves)}</answer>", MOVES, most) == tuple(moves[:most])


@settings(deadline=None)
@given(st.text(alphabet="<>/answer{}\\boxed|up \n", max_size=60))
def test_one_move_and_several_use_the_same_tags(text: str) -> None:
    one, several = parse_answer(text, MOVES), parse_answers(text, MOVES, 9)
    assert one is None or several == (one,)
    assert len(several) == 1 or one is None


def test_a_megabyte_and_a_thousand_tags_are_read_like_any_other_text() -> None:
    assert parse_answer("x" * 2**20 + "<answer>up</answer>", MOVES) == "up"
    assert parse_answer("<answer>" * 1000 + "down" + "</answer>" * 1000, MOVES) == "down"
    assert parse_answer("<answer>" * 2**17, MOVES) is None
    assert parse_answer("\\boxed{" * 2**17, MOVES) is None
    assert parse_answer("\\boxed{" * 1000 + "left}", MOVES) == "left"
    assert parse_answer("<answer>" + "up" * 2**19 + "</answer>", MOVES) is None
    assert parse_answers("<answer>" + "up||" * 2**18 + "left</answer>", MOVES, 2) == ("up", "up")
    assert parse_answers("<answer>" + "|" * 2**20 + "</answer>", MOVES, 2) == ()


@pytest.mark.parametrize("piece", ["<answer>", "</answer>", "<answer>x</answer>", "\\boxed{", "\\boxed{x}", "}", "<"])
def test_the_number_of_passes_does_not_depend_on_the_text(piece: str) -> None:
    assert _calls_to_parse(piece * 10_000) == _calls_to_parse(piece * 10) <= 8


@settings(deadline=None)
@given(st.text(), st.sampled_from(MOVES), st.text())
def test_nothing_around_a_pair_of_tags_is_an_error(before: str, move: str, after: str) -> None:
    assert parse_answer(f"{before}<answer>{move}</answer>{after}", [*MOVES]) == move


def _calls_to_parse(text: str) -> int:
    """Count the calls of parsing; each visits every character at most once."""
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
