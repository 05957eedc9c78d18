"""Tasks in the formats of other data sets."""

from .folders import write_folder_of
from .rows import read_tasks

__all__ = ["read_tasks", "write_folder_of"]
