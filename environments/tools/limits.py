"""Limits of an episode with tools, and of the text that a tool returns."""

from __future__ import annotations

from dataclasses import dataclass

from ..options import check_integer, check_number

LEASE_S = 600.0
"""Maximum seconds that an episode or a grader waits for room for its sandbox."""

MAX_OUTPUT = 10_000
"""Default of the maximum characters of a tool's result."""

_MAX_S = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolLimits:
    """Limits of an episode with tools.

    Attributes:
        max_turns: Maximum number of actions; after the last one, the episode is truncated.
        command_timeout_s: Maximum seconds of one tool call.
        episode_timeout_s: Maximum seconds of all tool calls of an episode together.
        max_output: Maximum characters of a tool's result; of a longer one, the middle is cut.
    """

    max_turns: int
    command_timeout_s: float
    episode_timeout_s: float
    max_output: int

    def __post_init__(self) -> None:
        check_integer("max_turns", self.max_turns, low=1, high=100_000)
        check_number("command_timeout_s", self.command_timeout_s, low=0.1, high=_MAX_S)
        check_number("episode_timeout_s", self.episode_timeout_s, low=0.1, high=_MAX_S)
        check_integer("max_output", self.max_output, low=100, high=1 << 20)


def cut_middle(text: str, limit: int) -> str:
    """Return `text`, or if it is longer than `limit` characters, its two ends with the number of characters cut."""
    if len(text) <= limit:
        return text
    first = limit // 2
    last = limit - first
    return f"{text[:first]}\n... {len(text) - limit:,} characters cut ...\n{text[-last:]}"
