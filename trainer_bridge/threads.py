"""torch's threads: how they wait for each other, and their number."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_WAITING = "OMP_WAIT_POLICY"
_SET_BY_USERS = (_WAITING, "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def wait_passively() -> None:
    """Let OpenMP's threads sleep while they wait, unless the user has set how they wait; call this before torch loads.

    By default, they spin. If another program runs, a thread that spins takes the core that the thread it waits for
    needs, and sampling and learning take more than twice as long (``docs/evidence/torch-threads.json``). The setting
    is an environment variable, so programs that this process starts have it too, such as vLLM's server.
    """
    if any(name in os.environ for name in _SET_BY_USERS):
        return
    os.environ[_WAITING] = "passive"
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() > 1:
        warnings.warn(
            "torch was loaded before envkit could set OMP_WAIT_POLICY=passive, so its threads spin while they wait: "
            "sampling is slow while other programs run. Set this environment variable before Python starts",
            RuntimeWarning,
            stacklevel=2,
        )


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Set the number of torch threads during a ``with`` block; 0 leaves the number unchanged.

    Enter the block in the thread that computes, because OpenMP keeps a separate number for each thread that calls it.
    """
    import torch

    before = torch.get_num_threads()
    if count and count != before:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if torch.get_num_threads() != before:
            torch.set_num_threads(before)


def default_threads() -> int:
    """Return torch's own number of threads: one per core, or the user's OMP_NUM_THREADS."""
    import torch

    return torch.get_num_threads()
