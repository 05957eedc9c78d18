"""Removal of thoughts, ``<think>...</think>``, from model output. This module needs no torch and no chat template."""

from __future__ import annotations

import re

THINK, END_THINK = "<think>", "</think>"

_CLOSED_THOUGHT = re.compile(f"{THINK}.*?{END_THINK}", re.DOTALL)


def without_thoughts(text: str, *, is_thinking: bool = False) -> str:
    """Return a completion without its ``<think>...</think>`` blocks and the whitespace after them.

    If a block is not closed, the completion was cut off before its answer, and the result is empty.

    Args:
        text: The completion.
        is_thinking: Whether the prompt ends with an open ``<think>``, so that the completion starts inside a block.
    """
    if is_thinking and END_THINK not in text:
        return ""
    answer = _CLOSED_THOUGHT.sub("", text).rpartition(END_THINK)[2]
    if THINK in answer:
        return ""
    return answer if answer == text else answer.lstrip()
