"""Environments in which a model uses tools: their base class, tools, and the parser of tool calls."""

from envkit.types import Submission

from .calls import CallStatus, ToolCall, how_to_call, parse_call, write_call
from .env import ToolEnv, read_files
from .limits import ToolLimits, cut_middle
from .shell_tools import bash, edit_file, format_result, submit, view_file
from .tool import Tool, ToolFunction, tool_of

__all__ = [
    "CallStatus",
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
    "read_files",
    "submit",
    "tool_of",
    "view_file",
    "write_call",
]
