"""The number of torch threads: few to sample from a tiny policy, one per core to learn."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Set the number of torch threads in the block; 0 does not change it.

    OpenMP keeps this number per calling thread, so enter the block in the thread that computes.
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
        load: Load average of the machine before the run.

    Returns:
        The number, and one line with the reason if it is reduced; otherwise an empty line.
    """
    cores = os.cpu_count() or 1
    default = torch.get_num_threads()
    if default > 1 and load > cores:
        return 1, f"threads: 1 to learn, because the load average {load:.1f} is above the {cores} cores"
    return default, ""
