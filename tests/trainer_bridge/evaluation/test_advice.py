"""Warnings about a language model's evaluation."""

from __future__ import annotations

from envkit.trainer_bridge.evaluation.advice import Limits, advice
from envkit.trainer_bridge.evaluation.outcomes import EpisodeOutcome
from envkit.types import StopReason


def test_prompts_that_leave_no_room_for_an_answer_are_reported_as_cut_off() -> None:
    episode = EpisodeOutcome(StopReason.CONTEXT_OVERFLOW)
    lines = advice([[episode], [episode]], Limits(turn_tokens=8, max_turns=1, max_tokens=8))
    assert lines == [
        "cut off: 2 of 2 episodes reached --max-tokens (8)",
        "no prompt left room for an answer: raise --max-tokens, or shorten the prompt",
    ]
