"""Code: programming problems, graded by hidden tests in a sandbox."""

from .env import Code
from .task_set import CodeOptions, CodeTasks

__all__ = ["Code", "CodeOptions", "CodeTasks"]
