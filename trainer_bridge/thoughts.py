"""Thoughts in what a language model wrote: ``<think>...</think>``. Free of torch and of chat templates."""

from __future__ import annotations

import re

THINK, END_THINK = "<think>", "</think>"

_CLOSED_THOUGHT = re.compile(f"{THINK}.*?{END_THINK}", re.DOTALL)


def without_thoughts(text: str, *, is_thinking: bool = False) -> str:
    """Return a completion without its ``<think>...</think>`` blocks and the whitespace that follows them.

    It is empty where a block was not closed, since the policy was cut off before it answered.

    Args:
        text: The completion.
        is_thinking: Whether the prompt ended with an open ``<think>``.
    """
    if is_thinking and END_THINK not in text:
        return ""
    spoken = _CLOSED_THOUGHT.sub("", text).rpartition(END_THINK)[2]
    if THINK in spoken:
        return ""
    return spoken if spoken == text else spoken.lstrip()
