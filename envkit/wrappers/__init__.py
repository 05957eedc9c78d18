"""Wrappers for text environments: each is a ``gymnasium.Wrapper`` for any text ``gymnasium.Env``.

They do not duplicate the wrappers of Gymnasium (``TimeLimit``, ``TransformObservation``, ``TransformReward``,
``RecordEpisodeStatistics``).
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
