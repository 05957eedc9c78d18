"""Wrappers for text environments. Each wrapper is a ``gymnasium.Wrapper`` for any ``gymnasium.Env`` of texts.

This package contains nothing that Gymnasium's own wrappers already do (``TimeLimit``, ``TransformObservation``,
``TransformReward``, ``RecordEpisodeStatistics``).
"""

from envkit.wrappers.answers import FormatPenalty, StrictAnswer
from envkit.wrappers.history import EpisodeHistory, History, chat, observations, transcript
from envkit.wrappers.statistics import EpisodeStatistics
from envkit.wrappers.tools import Tool, ToolResult, ToolUse

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
