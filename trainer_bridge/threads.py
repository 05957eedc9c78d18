"""The number of torch threads: few for sampling from a tiny policy, one per core for learning."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Set the number of torch threads during a ``with`` block; 0 leaves the number unchanged.

    Enter the block in the thread that computes, because OpenMP keeps a separate number for each thread that calls it.
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
    """Return the number of threads for learning, and a line for the user if it was reduced (otherwise an empty text).

    If `load`, the machine's load average before the run, exceeds the number of cores, the number is reduced to 1.
    """
    cores = os.cpu_count() or 1
    default = torch.get_num_threads()
    if default > 1 and load > cores:
        return 1, f"threads: 1 for learning, because the load average {load:.1f} exceeds the number of cores ({cores})"
    return default, ""
