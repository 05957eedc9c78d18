"""Grading by a judge model: what its answer is worth, and what voids the episode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import anyio
import pytest

from envkit.environments.tasks import ask_judge
from envkit.errors import TooLargeError, UnreachableError


class ScriptedJudge:
    def __init__(self, reply: str | Exception) -> None:
        self.reply = reply
        self.asked: list[Mapping[str, str]] = []

    async def ask(self, messages: Sequence[Mapping[str, str]], *, max_tokens: int = 512) -> str:
        self.asked += messages
        if isinstance(self.reply, Exception):
            raise self.reply
        return self.reply


@pytest.mark.parametrize(
    ("reply", "grade"),
    [
        ("Good, but slow: <answer>0.75</answer>", 0.75),
        ("The score is 1.", 1.0),
        ("Score: 7/10", 0.7),
        ("I give 3 of 5.", 0.6),
        ("80%", 0.8),
        ("Score: .8", 0.8),
        ("<answer>7</answer>", None),
        ("[[7]]", None),
        ("11/10", None),
        ("-0.5", None),
        ("0.7 or 0.8", None),
        ("0.7-0.8", None),
        ("1e-1x", None),
        ("It is excellent.", None),
        (UnreachableError("no answer"), None),
        (TooLargeError("the chat is too long for the judge"), 0.0),
    ],
)
def test_a_judge_grades_and_an_answer_that_cannot_be_read_voids(reply: str | Exception, grade: float | None) -> None:
    async def main() -> None:
        judge = ScriptedJudge(reply)
        assert await ask_judge(judge, "Grade this: 42") == grade
        assert judge.asked == [{"role": "user", "content": "Grade this: 42"}]

    anyio.run(main)
