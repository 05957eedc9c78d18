"""Finding the board in an observation."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envkit.environments.board import find_board, spread_out


@pytest.mark.parametrize(
    "text",
    [
        "#P\n_X",
        "Some rules.\n\n#P\n_X",
        "A notice.\n#P\n_X",
        "#P\n_X\n",
        "ab\ncd\n#P\n_X",  # what stands above may be as wide as the board
    ],
)
def test_the_board_is_the_square_at_the_end(text: str) -> None:
    assert find_board(text) == "#P\n_X"


@pytest.mark.parametrize("text", ["", "\n\n", "abc", "ab", "a\nbc", "abc\nde\nfgh", "abc\n\ndef", "a\nb\ncd"])
def test_a_text_that_does_not_end_with_a_square_has_no_board(text: str) -> None:
    assert find_board(text) == ""


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 32), st.randoms(use_true_random=False), st.text())
def test_a_board_of_any_size_is_found_below_any_text_with_or_without_spaces(
    size: int, rng: random.Random, above: str
) -> None:
    board = "\n".join("".join(rng.choices("_OGPX√#", k=size)) for _ in range(size))
    assert find_board(board) == find_board(f"{above}\n{board}") == find_board(f"{above}\n\n{board}\n") == board
    assert find_board(f"{above}\n{spread_out(board)}\n", spaced=True) == board


@pytest.mark.parametrize("text", ["", "# P\n_X", "# P\n_ X X", "#.P\n_ X", "# P", "#  P\n_  X"])
def test_a_text_that_does_not_end_with_a_spaced_square_has_no_spaced_board(text: str) -> None:
    assert find_board(text, spaced=True) == ""


def test_a_single_character_is_a_board_of_one_cell() -> None:
    assert find_board("hello\nP") == "P"
