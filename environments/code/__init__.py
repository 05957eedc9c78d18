"""Code: programming problems, graded by hidden tests in a sandbox."""

from .env import Code
from .players import CodeNop, CodeOracle
from .task_set import CodeOptions, CodeTasks

__all__ = ["Code", "CodeNop", "CodeOptions", "CodeOracle", "CodeTasks"]
