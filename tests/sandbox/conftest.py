"""Shared by the tests of sandboxes: processes that can be found by their arguments."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.contract.kinds import new_marker
from tests.contract.kinds import sleepers as find_sleepers
from tests.contract.shared import sandboxes

__all__ = ["sandboxes"]


@pytest.fixture
def marker() -> str:
    """A number of seconds that nobody else on the machine sleeps, by which a ``sleep`` is found again."""
    return new_marker()


@pytest.fixture
def sleepers(marker: str) -> Callable[[], int]:
    """Counts the processes, anywhere on the machine, that sleep for `marker`."""
    return lambda: len(find_sleepers(marker))
