"""Wrappers around worlds of text: each is a ``gymnasium.Wrapper`` and goes around any ``gymnasium.Env`` of text.

What Gymnasium's own do well (``TimeLimit``, ``TransformObservation``, ``TransformReward``, ``RecordEpisodeStatistics``)
is not here once more.
"""

from envkit.wrappers.answers import FormatPenalty, StrictAnswer
from envkit.wrappers.history import History, PastTurn, chat, observations, transcript
from envkit.wrappers.statistics import EpisodeStatistics
from envkit.wrappers.tools import Tool, ToolResult, ToolUse

__all__ = [
    "EpisodeStatistics",
    "FormatPenalty",
    "History",
    "PastTurn",
    "StrictAnswer",
    "Tool",
    "ToolResult",
    "ToolUse",
    "chat",
    "observations",
    "transcript",
]
