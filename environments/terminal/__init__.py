"""Terminal: work in a shell of a sandbox on a task, whose tests then verify the result."""

from .env import Terminal
from .options import TerminalOptions, TerminalTasks

__all__ = ["Terminal", "TerminalOptions", "TerminalTasks"]
