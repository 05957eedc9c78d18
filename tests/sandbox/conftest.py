"""Shared by the tests of sandboxes: processes that can be found by their arguments."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.contract.boxes import new_marker
from tests.contract.boxes import sleepers as find_sleepers
from tests.contract.shared import sandboxes

__all__ = ["sandboxes"]


@pytest.fixture
def marker() -> str:
    """A number of seconds that no other process on the machine sleeps; it identifies a ``sleep``."""
    return new_marker()


@pytest.fixture
def sleepers(marker: str) -> Callable[[], int]:
    """Count the processes on the machine that sleep for `marker` seconds."""
    return lambda: len(find_sleepers(marker))
