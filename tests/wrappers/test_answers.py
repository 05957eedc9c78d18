"""Answers: strict forms, and what a bad one costs."""

from __future__ import annotations

import pytest

import envkit
from envkit.clock import stopwatch
from envkit.errors import StepOrderError, UsageError
from envkit.wrappers import EpisodeStatistics, FormatPenalty, StrictAnswer
from envkit.wrappers.answers import strict_answer
from tests.wrappers.envs import Echo


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("<answer>up</answer>", "<answer>up</answer>"),
        (" \n<ANSWER> Up </Answer>\t", "<ANSWER> Up </Answer>"),
        ("İ<answer>up</answer>", None),
        ("<answer>İ up</answer>", "<answer>İ up</answer>"),
        ("I say <answer>up</answer>", None),
        ("<answer>up</answer>.", None),
        ("<answer>up</answer><answer>up</answer>", None),
        ("<answer>up", None),
        ("<think>up</think><answer>up</answer>", None),
        ("up", None),
    ],
)
def test_a_strict_answer_is_the_whole_reply(reply: str, answer: str | None) -> None:
    assert strict_answer(reply, think=False) == answer


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("<think>up?</think><answer>down</answer>", "<answer>down</answer>"),
        ("<think></think>\n\n<answer>down</answer>\n", "<answer>down</answer>"),
        ("<answer>down</answer>", None),
        ("well <think>a</think><answer>down</answer>", None),
        ("<think>a</think> so <answer>down</answer>", None),
        ("<think>a</think><answer>down</answer> so", None),
        ("<think>a<answer>up</answer></think><answer>down</answer>", None),
        ("<think>a<think>b</think><answer>down</answer>", None),
        ("<answer>down</answer><think>a</think>", None),
    ],
)
def test_with_thoughts_they_come_first_and_the_answer_alone_counts(reply: str, answer: str | None) -> None:
    assert strict_answer(reply, think=True) == answer


def test_the_environment_gets_an_empty_action_for_a_reply_of_another_form() -> None:
    env = StrictAnswer(envkit.make("FrozenLake-v0"))
    env.reset(seed=0)
    *_, info = env.step("I think <answer>up</answer>")
    assert (info["format_is_valid"], info["action_is_valid"]) == (False, False)
    *_, info = env.step("<answer>up</answer>")
    assert (info["format_is_valid"], info["action_is_valid"]) == (True, True)


def test_long_and_hostile_replies_take_no_time() -> None:
    for reply in ("<answer>" * 200_000, "<think>" + "<" * 1_000_000, " " * 1_000_000, "<answer>" + "x" * 1_000_000):
        began = stopwatch()
        assert strict_answer(reply, think=True) is None
        assert stopwatch() - began < 5  # seconds; quadratic work would take hours


def test_an_unreadable_answer_costs_its_penalty_and_is_a_metric() -> None:
    env = EpisodeStatistics(FormatPenalty(Echo(), 0.25))
    env.reset()
    assert env.step("!!")[1] == -0.25
    assert env.step("wait")[1] == 0.0
    *_, info = env.step("win")
    assert info["episode"]["r"] == 0.75
    assert info["episode"]["format_penalty"] == pytest.approx(0.25 / 3)


def test_it_may_end_the_episode() -> None:
    env = FormatPenalty(Echo(limit=1), 0.1, ends_episode=True)
    env.reset()
    assert env.step("!!")[1:4] == (-0.1, True, False)  # ended by the form, whatever else would have ended it
    with pytest.raises(StepOrderError):
        env.step("wait")


def test_a_negative_penalty_is_refused() -> None:
    with pytest.raises(UsageError, match="penalty: must be a finite number of at least 0, got -1"):
        FormatPenalty(Echo(), -1)
