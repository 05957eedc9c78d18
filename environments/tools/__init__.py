"""Environments in which a model uses tools: their base class, tools, the parser of tool calls, and graders."""

from envkit.types import Submission

from .calls import CallStatus, ToolCall, how_to_call, parse_call
from .env import ToolEnv
from .graders import AdaptiveTimeout, JudgeGrader, RuleGrader, SandboxGrader, read_score
from .limits import ToolLimits, cut_middle
from .script import Script, write_call
from .shell_tools import bash, edit_file, format_result, submit, view_file
from .tool import Tool, ToolFunction, tool_of

__all__ = [
    "AdaptiveTimeout",
    "CallStatus",
    "JudgeGrader",
    "RuleGrader",
    "SandboxGrader",
    "Script",
    "Submission",
    "Tool",
    "ToolCall",
    "ToolEnv",
    "ToolFunction",
    "ToolLimits",
    "bash",
    "cut_middle",
    "edit_file",
    "format_result",
    "how_to_call",
    "parse_call",
    "read_score",
    "submit",
    "tool_of",
    "view_file",
    "write_call",
]
