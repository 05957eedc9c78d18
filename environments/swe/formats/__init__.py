"""Tasks in the formats of other data sets."""

from .rows import read_tasks, write_folder_of

__all__ = ["read_tasks", "write_folder_of"]
