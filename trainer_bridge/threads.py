"""The number of torch threads: few for sampling from a tiny policy, one per core for learning."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Set the number of torch threads during a ``with`` block; 0 leaves the number unchanged.

    Use it in the thread that computes, because OpenMP keeps a separate number for each calling thread.
    """
    before = torch.get_num_threads()
    if count and count != before:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if torch.get_num_threads() != before:
            torch.set_num_threads(before)


def learning_threads(load: float) -> tuple[int, str]:
    """Choose the number of threads for learning.

    Args:
        load: The machine's load average before the run.

    Returns:
        The number of threads, and a line of text that explains a reduced number. Otherwise, the text is empty.
    """
    cores = os.cpu_count() or 1
    default = torch.get_num_threads()
    if default > 1 and load > cores:
        return 1, f"threads: 1 to learn, because the load average {load:.1f} is above the {cores} cores"
    return default, ""
