"""A disk that is almost full."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FULL = "(No space left on device|File too large)"
"""What the system says, as a pattern."""


@contextmanager
def full_disk(place: Path, room: int) -> Iterator[None]:
    """Limit the bytes that can be written: with a small file system for root, with a file size limit for others."""
    place.mkdir()
    if os.geteuid() == 0:
        mount = ["mount", "-t", "tmpfs", "-o", f"size={room}", "tmpfs", str(place)]
        done = subprocess.run(mount, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            try:
                yield
            finally:
                subprocess.run(["umount", str(place)], check=True)
            return
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room // 4, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
