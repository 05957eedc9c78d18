"""Terminal: work in a shell of a sandbox on a task, whose tests then verify the result."""

from .env import Terminal
from .options import TerminalOptions, TerminalTasks
from .players import TerminalNop, TerminalOracle

__all__ = ["Terminal", "TerminalNop", "TerminalOptions", "TerminalOracle", "TerminalTasks"]
