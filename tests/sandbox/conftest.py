"""What the tests of sandboxes share: processes that can be found again."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.contract import kinds
from tests.contract.shared import sandboxes

__all__ = ["sandboxes"]


@pytest.fixture
def marker() -> str:
    """A number of seconds that nobody else on the machine sleeps, by which a ``sleep`` is found again."""
    return kinds.new_marker()


@pytest.fixture
def sleepers(marker: str) -> Callable[[], int]:
    """Counts the processes, anywhere on the machine, that sleep for `marker`."""
    return lambda: len(kinds.sleepers(marker))
