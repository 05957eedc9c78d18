"""Wrappers for the format of answers: strict parsing, and a penalty for invalid answers."""

from __future__ import annotations

import re
from itertools import islice

from envkit.errors import UsageError
from envkit.wrappers.wrapping import TextEnv, TextStep, TextWrapper

_TAGS = re.compile("</?(?:think|answer)>", re.IGNORECASE | re.ASCII)
_THOUGHT = ["<think>", "</think>"]


class FormatPenalty(TextWrapper):
    """Subtracts `penalty` from the reward of an invalid answer (``info["action_is_valid"]`` is false).

    Adds the metric ``format_penalty``: the amount subtracted in a step, averaged over the steps of an episode.

    Args:
        env: A text environment that reports ``action_is_valid``.
        penalty: Amount to subtract, at least 0.
        ends_episode: Whether an invalid answer also terminates the episode, as in the library GEM.
    """

    def __init__(self, env: TextEnv, penalty: float, *, ends_episode: bool = False) -> None:
        super().__init__(env, metrics={"format_penalty": "mean"}, penalty=penalty, ends_episode=ends_episode)
        if not 0 <= penalty < float("inf"):
            raise UsageError(f"penalty: must be a finite number of at least 0, got {penalty}")
        self._penalty = penalty
        self._ends_episode = ends_episode

    def _played(self, action: str) -> TextStep:
        observation, reward, terminated, truncated, info = super()._played(action)
        is_bad = info.get("action_is_valid") is False
        if is_bad and self._ends_episode:
            terminated, truncated = True, False
        cost = self._penalty if is_bad else 0.0
        return observation, reward - cost, terminated, truncated, {**info, "format_penalty": cost}


class StrictAnswer(TextWrapper):
    """Passes a reply to the environment if it is exactly ``<answer>...</answer>``, and otherwise an empty text.

    Without this wrapper, environments accept an answer anywhere in a reply. Adds the metric ``format_is_valid``, the
    share of an episode's replies with the exact form.

    Args:
        env: A text environment.
        think: Whether ``<think>...</think>`` must precede the answer. The environment gets only the answer.
    """

    def __init__(self, env: TextEnv, *, think: bool = False) -> None:
        super().__init__(env, metrics={"format_is_valid": "mean"}, think=think)
        self._think = think

    def _played(self, action: str) -> TextStep:
        answer = strict_answer(action, think=self._think)
        observation, reward, terminated, truncated, info = super()._played(answer or "")
        return observation, reward, terminated, truncated, {**info, "format_is_valid": answer is not None}


def strict_answer(reply: str, *, think: bool) -> str | None:
    """Return the ``<answer>...</answer>`` part of `reply`; None if `reply` contains anything else.

    If `think` is true, a ``<think>...</think>`` part must precede the answer. Whitespace around the tags is
    allowed, and tags are case-insensitive. The run time is linear in the reply's length.
    """
    tags = [(found[0].lower(), found.start(), found.end()) for found in islice(_TAGS.finditer(reply), 5)]
    if [tag for tag, _, _ in tags] != (_THOUGHT if think else []) + ["<answer>", "</answer>"]:
        return None
    # Only whitespace is allowed outside the pairs of tags.
    ends = [0, *(end for _, _, end in tags[1::2])]
    starts = [*(start for _, start, _ in tags[::2]), len(reply)]
    if any(reply[end:start].strip() for end, start in zip(ends, starts, strict=True)):
        return None
    return reply[tags[-2][1] : tags[-1][2]]
