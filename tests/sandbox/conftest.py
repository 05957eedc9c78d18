"""What the tests of sandboxes share: processes that can be found again."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def marker() -> str:
    """A number of seconds that nobody else on the machine sleeps, by which a ``sleep`` is found again."""
    return f"{100_000 + secrets.randbelow(900_000)}.{secrets.randbelow(1_000_000):06}"


@pytest.fixture
def sleepers(marker: str) -> Callable[[], int]:
    """Counts the processes, anywhere on the machine, that sleep for `marker`."""

    def count() -> int:
        return sum(_arguments(entry)[:2] == [b"sleep", marker.encode()] for entry in Path("/proc").iterdir())

    return count


def _arguments(entry: Path) -> list[bytes]:
    if not entry.name.isdecimal():
        return []
    try:
        return entry.joinpath("cmdline").read_bytes().split(b"\0")  # of a dead process: empty
    except OSError:
        return []
