"""Histories: what a policy is shown of the episode so far."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envkit.errors import UsageError
from envkit.wrappers import EpisodeHistory, History, ToolUse, chat, observations, transcript
from envkit.wrappers.history import Style
from tests.wrappers.envs import Adder, Echo


def play(style: Style, replies: list[str], limit: int | None = None) -> list[str]:
    env = History(Echo(), style, limit=limit)
    return [env.reset()[0], *(env.step(reply)[0] for reply in replies)]


def test_a_transcript_has_the_replies_between_them() -> None:
    assert play(transcript, ["a", "b"])[-1] == "the rules\n\na\n\n1: a\n\nb\n\n2: b"


def test_the_chat_style_passes_a_list_of_messages_to_its_renderer() -> None:
    texts = play(chat(lambda messages: " ".join(f"{one['role'][0]}({one['content']})" for one in messages)), ["a", "b"])
    assert texts[0] == "u(the rules)"
    assert texts[-1] == "u(the rules) a(a) u(1: a) a(b) u(2: b)"


def test_a_limit_keeps_the_rules_and_the_newest_turns_and_says_what_is_missing() -> None:
    texts = play(observations, ["a", "b", "c", "d"], limit=2)
    assert texts[2] == "the rules\n\n1: a\n\n2: b"
    assert texts[3] == "the rules\n\n[1 earlier turn is not shown]\n\n2: b\n\n3: c"
    assert texts[4] == "the rules\n\n[2 earlier turns are not shown]\n\n3: c\n\n4: d"
    with pytest.raises(UsageError, match="limit: must be at least 1, got 0"):
        History(Echo(), limit=0)


@pytest.mark.parametrize(
    ("style", "message"),
    [
        (chat, r"such as chat\(render\), got <class"),
        (EpisodeHistory, "such as transcript, got <class"),
        ("chat", "got 'chat'"),
    ],
)
def test_an_invalid_style_is_refused_at_once(style: Any, message: str) -> None:
    with pytest.raises(UsageError, match=f"style: must be a function of an EpisodeHistory, .*{message}"):
        History(Echo(), style)


@given(st.lists(st.text(max_size=20), max_size=12), st.integers(1, 4))
def test_the_newest_observation_is_always_there(replies: list[str], limit: int) -> None:
    for count, text in enumerate(play(transcript, replies, limit=limit)[1:], 1):
        assert text.startswith("the rules")
        assert text.endswith(f"{count}: {replies[count - 1]}")


def test_turns_that_do_not_fit_are_left_out_with_a_note() -> None:
    env = History(Echo(), transcript)
    env.reset()
    for _ in range(5):
        text, *_ = env.step("x" * 250_000)
        assert env.observation_space.contains(text)
    assert "[1 earlier turn is not shown]" in text
    text, *_ = env.step("x" * (1 << 21))
    assert "[2 earlier turns are not shown]" in text
    assert "[1,835,008 more characters are cut]" in text
    wordy = History(Echo(), lambda past: "x" * (1 << 21))
    with pytest.raises(UsageError, match="style: returned 2,097,152 characters for one turn"):
        wordy.reset()


def test_only_the_part_of_a_reply_that_was_used_is_kept() -> None:

    env = History(ToolUse(Echo(), [Adder()], instructions=False), transcript)
    env.reset()
    assert env.step("so add 2 3! It is 7")[0] == "the rules\n\nso add 2 3!\n\n5\n[9 of 10 tool uses left]"
