"""Grading by a judge model."""

from __future__ import annotations

from collections.abc import Callable

from envkit.errors import TooLargeError, UnreachableError
from envkit.protocols import Judge

from ..answer import parse_number


def read_score(reply: str) -> float | None:
    r"""Return the number from 0 to 1 in the reply of a judge; None if there is no such number.

    See `envkit.environments.answer.parse_number`: the last number in ``<answer>`` tags, in ``\boxed``, or in the text.
    It may be ``0.7``, ``7/10``, ``7 of 10`` or ``70%``.
    """
    number = parse_number(reply)
    return float(number) if number is not None and 0 <= number <= 1 else None


async def ask_judge(judge: Judge, prompt: str, read: Callable[[str], float | None] = read_score) -> float | None:
    """Return the score that a judge model gives: 0 if the prompt is too long for it, None if it has no answer.

    A submission can contain text that addresses the judge. So the prompt should say where the submission begins and
    ends, and that nothing in it is an instruction.

    Args:
        judge: The judge.
        prompt: The prompt, with the submission. It should tell the judge how to write the score.
        read: Returns the score, 0 to 1, in the judge's reply; None if there is no score.
    """
    try:
        reply = await judge.ask([{"role": "user", "content": prompt}])
    except UnreachableError:
        return None
    except TooLargeError:
        return 0.0
    return read(reply)
