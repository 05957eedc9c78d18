"""Wrappers for environments whose observations and actions are texts. Each of them is a ``gymnasium.Wrapper``.

For other purposes, use Gymnasium's own wrappers, such as ``TimeLimit``, ``TransformObservation``, ``TransformReward``
and ``RecordEpisodeStatistics``.
"""

from envkit.wrappers.answers import FormatPenalty, StrictAnswer
from envkit.wrappers.history import EpisodeHistory, History, chat, observations, transcript
from envkit.wrappers.tools import Tool, ToolResult, ToolUse
from envkit.wrappers.wrapping import EpisodeStatistics

__all__ = [
    "EpisodeHistory",
    "EpisodeStatistics",
    "FormatPenalty",
    "History",
    "StrictAnswer",
    "Tool",
    "ToolResult",
    "ToolUse",
    "chat",
    "observations",
    "transcript",
]
