"""How many threads torch computes with: few to play a tiny policy, one a core to learn."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Compute with `count` threads in the block; 0 leaves their number as it is.

    OpenMP keeps this number for each calling thread, so enter the block in the thread that computes.
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
    """Choose how many threads learn.

    Args:
        load: Load average of the machine before the run.

    Returns:
        The number, and one line that says why it is below the usual one; empty if it is not.
    """
    cores = os.cpu_count() or 1
    usual = torch.get_num_threads()
    if usual > 1 and load > cores:
        return 1, f"threads: 1 to learn, because the load average {load:.1f} is above the {cores} cores"
    return usual, ""
