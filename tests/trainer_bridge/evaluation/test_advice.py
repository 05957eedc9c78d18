"""Warnings about a language model's evaluation."""

from __future__ import annotations

from envkit.trainer_bridge.evaluation.advice import advice
from envkit.trainer_bridge.evaluation.outcomes import EvaluatedEpisode
from envkit.trainer_bridge.rollout import RolloutLimits
from envkit.types import Outcome, StopReason


def test_prompts_that_leave_no_room_for_an_answer_are_reported_as_cut_off() -> None:
    episode = EvaluatedEpisode(Outcome.score(StopReason.CONTEXT_OVERFLOW, 0.0, {}))
    lines = advice([[episode], [episode]], RolloutLimits(turn_tokens=8, max_turns=1, max_tokens=8))
    assert lines == [
        "cut off: 2 of 2 episodes reached rollout.max_tokens (8)",
        "no prompt left room for an answer: raise rollout.max_tokens, or shorten the prompt",
    ]


def test_a_time_that_ends_before_the_first_answer_is_named() -> None:
    episode = EvaluatedEpisode(Outcome.score(StopReason.PLAYER_TIMEOUT, 0.0, {}))
    lines = advice([[episode]], RolloutLimits(turn_tokens=8, max_turns=1, max_tokens=8, player_timeout_s=2.0))
    assert lines == [
        "cut off: 1 of 1 episodes reached rollout.player_timeout_s (2.0)",
        "the model's time ended before its first answer: raise rollout.player_timeout_s",
    ]
