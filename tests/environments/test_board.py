"""Finding the board in an observation."""

from __future__ import annotations

import pytest

from envkit.environments.board import find_board


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


def test_a_single_character_is_a_board_of_one_cell() -> None:
    assert find_board("hello\nP") == "P"
