"""Parsing the move in the output of a language model."""

from __future__ import annotations

import sys
from decimal import Decimal
from fractions import Fraction
from types import FrameType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envkit.environments.answer import code_block, parse_answer, parse_answers, parse_number
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
        ("<answer>\\boxed{up}</answer>", "up"),
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
        *("", "I go up", "up.", "up down", "<answer>up", "</answer>up<answer>", "<answer></answer>"),
        *("<answer>u p</answer>", "<answer>up\x00</answer>", "\\boxed{}", "\\boxed{up", "\\boxed{up||down}"),
        "<answer>up || down</answer>",
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
    assert _calls_to_parse(piece * 10_000) == _calls_to_parse(piece * 10) <= 10


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


NUMBERS: dict[str, str | Fraction | None] = {
    "64": "64",
    "+5": "5",
    "64.0": "64",
    ".5": "0.5",
    "\N{EN DASH}5": "-5",
    "\N{MINUS SIGN}5": "-5",
    "\N{EM DASH}5": None,
    "- 5": None,
    "1_234": "1234",
    "1,234.5": "1234.5",
    "It is 1,234,567, I think.": "1234567",
    "1.234,5": None,
    "3,14": None,
    "1 234": None,
    "1'234": None,
    "6.02e23": "6.02e23",
    "1e-1": "0.1",
    "1e": None,
    "1e99999": None,
    "6.02 x 10^23": "6.02e23",
    "6.02 \\times 10^{23}": "6.02e23",
    "2^10": None,
    "10\N{SUPERSCRIPT TWO}": None,
    "50%": "0.5",
    "50\\%": "0.5",
    "50% of 20": None,
    "3 million": "3e6",
    "10k": None,
    "-$3": "-3",
    "$1,234.00": "1234",
    "It costs 3\N{EURO SIGN}.": "3",
    "$x = 42$": "42",
    "3/4": Fraction(3, 4),
    "6 / 3": "2",
    "1/0": None,
    "1/2/3": None,
    "2 1/2": "2.5",
    "2 3/2": None,
    "\N{VULGAR FRACTION ONE HALF}": None,
    "\\boxed{\\frac{3}{4}}": Fraction(3, 4),
    "\\boxed{2\\frac{1}{2}}": "2.5",
    "\\boxed{1\\,234}": "1234",
    "\\boxed{1{,}234}": "1234",
    "\\boxed{12\\text{ cm}}": "12",
    "\\boxed{5\\pi}": None,
    "\\boxed{2\\sqrt{3}}": None,
    "so 7 \\boxed{64} 8": "64",
    "\\boxed{\\boxed{5}}": "5",
    "\\boxed{5": None,
    "\\boxed{5} \\boxed{\\frac{3}": None,
    "<answer>\\boxed{5}</answer>": "5",
    "\\( 42 \\)": "42",
    "\\boxed{}": None,
    "12 cm^2": "12",
    "5 apples (red)": "5",
    "12cm": None,
    "3rd": None,
    "x = 2": "2",
    "v1.2.3": None,
    "GPT-4": None,
    "f(3) = 9": "9",
    "2025-06-01": None,
    "3:45": None,
    "10\N{EN DASH}12": None,
    "0x1F": None,
    "\N{ARABIC-INDIC DIGIT SIX}": None,
    "5 \N{ARABIC-INDIC DIGIT SIX}": None,
    "inf": None,
    "": None,
    "sixty-four": None,
    "23 + 41 = 64.": "64",
    "5 - 3": None,
    "7 (mod 5)": None,
    "1,2,3": None,
    "3 or 5": None,
    "5 \N{PLUS-MINUS SIGN} 1": None,
    "(3, 4)": None,
    "**42**": "42",
    "#### 42": "42",
    "[[7]]": "7",
    "It is 3. <answer>64</answer> or 5": "64",
    "<answer>none</answer> 64": None,
    "23+41\n64": "64",
    "9" * 40: "9" * 40,
    "0" * 2**20 + "7": "7",
}


@pytest.mark.parametrize(("text", "number"), NUMBERS.items(), ids=[text[:30] for text in NUMBERS])
def test_a_number_is_read_in_a_clear_form_and_in_no_other(text: str, number: str | Fraction | None) -> None:
    assert parse_number(text) == (Decimal(number) if isinstance(number, str) else number)


@pytest.mark.parametrize(
    "text", ["9" * 2**20 + "x", " 1" * 2**18, "1,234" * 2**17, "\\text{" * 2**17, "1" + " " * 2**20]
)
def test_a_megabyte_is_searched_for_a_number_in_linear_time(text: str) -> None:
    assert parse_number(text) in (None, 1)


CODE = "def f(x):\n    return x\n"
QUOTES = '"""\n{}```\nx\n{}```\n"""\n'
BLOCKS: dict[str, tuple[str, str]] = {
    "plain": (f"```python\n{CODE}```", CODE),
    "upper case": (f"```Python\n{CODE}```", CODE),
    "list": ("1. Code:\n   ```python\n   def f(x):\n       return x\n   ```\n2. Done.", CODE),
    "list marker": ("- ```python\n  def f(x):\n      return x\n  ```", CODE),
    "quote": ("> ```python\n> def f(x):\n>     return x\n> ```\n", CODE),
    "after text": (f"Here it is: ```python\n{CODE}```\nIt returns x.", CODE),
    "closed in the last line": ("```python\ndef f(x):\n    return x```\nThat is it.", CODE),
    "backticks in tildes": (f"~~~python\n{QUOTES.format('', '')}~~~", QUOTES.format("", "")),
    "info string": (f"```python title=f.py\n{CODE}```", CODE),
    "attributes": (f"```{{.python .numberLines}}\n{CODE}```", CODE),
    "space before the language": (f"``` python\n{CODE}```", CODE),
    "nested": (f"````python\n{QUOTES.format('', '')}````", QUOTES.format("", "")),
    "indented fences in the code": (f"```python\n{QUOTES.format('    ', '    ')}```", QUOTES.format("    ", "    ")),
    "unclosed": (f"```python\n{CODE}", CODE),
    "CR LF": (f"```python\n{CODE}```\n".replace("\n", "\r\n"), CODE),
    "several": (f"```python\nx = 1\n```\nBetter:\n```python\n{CODE}```\nIt prints:\n```\n3\n```", CODE),
    "inline code before": (f"Use ```f``` and `x`:\n```python\n{CODE}```", CODE),
    "fence in prose before": (f"I use ``` for the code below.\n```python\n{CODE}```", CODE),
    "empty lines": ("```python\n\nx = 1\n\n```", "\nx = 1\n\n"),
    "empty": ("```python\n```", ""),
}
NO_BLOCKS: dict[str, tuple[str, str]] = {
    "no fence": (CODE, CODE),
    "indented code": ("    x = 1\n", "    x = 1\n"),
    "two backticks": ("``x = 1``", "``x = 1``"),
    "another language": ("```bash\nls\n```", "ls\n"),
    "no language": ("```\nx = 1\n```", "x = 1\n"),
}


@pytest.mark.parametrize("name", [*BLOCKS, *NO_BLOCKS])
def test_the_last_block_of_the_language_is_read_as_in_commonmark(name: str) -> None:
    text, code = {**BLOCKS, **NO_BLOCKS}[name]
    assert code_block(text, ("python", "py")) == (code, name in BLOCKS)


@pytest.mark.parametrize("text", ["`" * 2**20, "`" * 2**20 + "x", "```x" * 2**18, " " * 2**20 + "> x", "```\n" * 2**16])
def test_a_megabyte_of_fences_is_read_in_linear_time(text: str) -> None:
    assert code_block(text, ("python",))[1] is False
