"""Tasks as folders: the formats of Harbor, which is also that of envkit, and of Terminal-Bench 1."""

from .harbor import read_task, write_task
from .rewards import RewardFileError, read_reward
from .terminal_bench import is_terminal_bench, left_out, read_tasks, task_folders

__all__ = [
    "RewardFileError",
    "is_terminal_bench",
    "left_out",
    "read_reward",
    "read_task",
    "read_tasks",
    "task_folders",
    "write_task",
]
