"""Every kind of sandbox on this machine, for the tests of what they all promise."""

from __future__ import annotations

import pytest

from tests.contract.boxes import KINDS, PARAMS, Kind, new_marker


@pytest.fixture(params=PARAMS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[str(request.param)]


@pytest.fixture
def marker() -> str:
    """A number of seconds that nobody else on the machine sleeps, by which a ``sleep`` is found again."""
    return new_marker()
