"""Tasks as folders: the formats of Harbor, which is also that of envkit, and of Terminal-Bench 1."""

from .harbor import read_task, write_task
from .terminal_bench import is_terminal_bench, left_out, read_tasks, read_terminal_bench, task_folders

__all__ = [
    "is_terminal_bench",
    "left_out",
    "read_task",
    "read_tasks",
    "read_terminal_bench",
    "task_folders",
    "write_task",
]
