"""Removal of thoughts, ``<think>...</think>``, from model output. This module needs no torch and no chat template."""

from __future__ import annotations

THINK, END_THINK = "<think>", "</think>"


def without_thoughts(text: str, *, is_thinking: bool = False) -> str:
    """Return a completion without its ``<think>...</think>`` blocks and the whitespace after them.

    If a block is not closed, the completion was cut off before its answer, and the result is empty. `is_thinking` is
    whether the prompt ends with an open ``<think>``, so that the completion starts inside a block.
    """
    if is_thinking and END_THINK not in text:
        return ""
    spoken, at = "", 0
    while (start := text.find(THINK, at)) >= 0 and (end := text.find(END_THINK, start)) >= 0:
        spoken, at = spoken + text[at:start], end + len(END_THINK)
    answer = (spoken + text[at:]).rpartition(END_THINK)[2]
    if THINK in answer:
        return ""
    return answer if answer == text else answer.lstrip()
