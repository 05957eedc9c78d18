"""The display of a run: a bar and a line per finished part on a terminal; lines at intervals elsewhere."""

from __future__ import annotations

import io
import math
import os
import pty
import re
from collections.abc import Iterator

import pytest

from envkit.runs.display import (
    Display,
    StreamDisplay,
    duration,
    figure,
)


class Hands:
    """A clock with a settable time."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds


def line_display() -> tuple[StreamDisplay, io.StringIO, Hands]:
    stream, hands = io.StringIO(), Hands()
    return StreamDisplay(stream, every_s=10, now=hands.now), stream, hands


def play(display: Display, hands: Hands, count: int, step_s: float) -> None:
    for number in range(count):
        hands.seconds += step_s
        display.advance(1, success=number / 100)


def test_without_a_terminal_there_is_a_line_now_and_then_and_one_at_the_end_of_a_part() -> None:
    display, stream, hands = line_display()
    display.announce("policy: 0.2 M parameters")
    display.phase("train", 9)
    play(display, hands, 9, 3.0)
    display.phase("evaluate", 2)
    play(display, hands, 2, 1.0)
    display.close()

    assert stream.getvalue().splitlines() == [
        "policy: 0.2 M parameters",
        "train 4/9  0:12  eta 0:15  success 0.030",
        "train 8/9  0:24  eta 0:03  success 0.070",
        "train 9/9  0:27  success 0.080",
        "evaluate 2/2  0:02  success 0.010",
    ]


def test_an_interrupted_part_continues_with_its_time_and_pace() -> None:
    display, stream, hands = line_display()
    display.phase("train", 10)
    display.advance(0)
    play(display, hands, 5, 2.0)
    display.phase("evaluate", 1)
    play(display, hands, 1, 4.0)
    display.phase("train", 10)
    display.advance(5)
    play(display, hands, 3, 4.0)
    display.close()

    assert stream.getvalue().splitlines()[-1] == "train 8/10  0:26  eta 0:06  success 0.020"


def test_figures_may_have_any_name_and_stay_until_replaced() -> None:
    display, stream, hands = line_display()
    display.phase("train", 2)
    shown: dict[str, float | str] = {"return": 3.14159, "tokens/s": 5210.4, "lost": 0, "held-out": "0.5"}
    display.advance(1, **shown)
    hands.seconds = 10
    display.advance()
    assert stream.getvalue().endswith("return 3.142  tokens/s 5,210  lost 0  held-out 0.5\n")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.0, "0.000"),
        (0.4123, "0.412"),
        (-31.44, "-31.4"),
        (5210.4, "5,210"),
        (12345, "12,345"),
        (0.00003, "3e-05"),
        (math.nan, "–"),
    ],
)
def test_a_figure_has_a_readable_number_of_digits(value: float, shown: str) -> None:
    assert figure(value) == shown


def test_durations() -> None:
    assert [duration(seconds) for seconds in (0, 59.6, 3599, 3723)] == ["0:00", "1:00", "59:59", "1:02:03"]


@pytest.fixture
def terminal() -> Iterator[tuple[StreamDisplay, int]]:
    """A display on a real terminal, and the terminal's other end."""
    leader, follower = pty.openpty()
    with os.fdopen(follower, "w") as stream:
        yield StreamDisplay(stream), leader
    os.close(leader)


def test_on_a_terminal_an_ended_part_leaves_one_line_and_the_cursor_comes_back(
    terminal: tuple[StreamDisplay, int],
) -> None:
    display, leader = terminal
    display.phase("train", 20)
    display.announce("[bold] is not markup here")
    display.advance(12, success=0.5)
    display.close()
    display.announce("done")

    raw = b""
    while not raw.endswith(b"done\r\n"):  # a terminal gives a few thousand bytes at a time
        raw += os.read(leader, 1 << 16)
    written = raw.decode()
    assert "[bold] is not markup here\r\n" in written
    assert "12/20" in written
    assert "━" in written or "-" in written
    assert re.search(r"train 12/20  \d+:\d\d  success 0\.500\r\n", written)
    assert written.rindex("\x1b[?25h") > written.rindex("\x1b[?25l")
