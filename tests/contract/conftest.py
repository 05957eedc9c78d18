"""Every kind of sandbox on this machine, for the tests of what they all promise."""

from __future__ import annotations

import pytest

from tests.contract.boxes import KINDS, PARAMS, REMOTE, Kind, new_marker

_REACHED_FROM_AFAR = ("test_sandbox_exec", "test_sandbox_files", "test_sandbox_shell")
"""Modules whose promises hold for a sandbox of another machine too."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "kind" in metafunc.fixturenames:
        assert metafunc.module is not None
        is_reached = metafunc.module.__name__.rpartition(".")[2] in _REACHED_FROM_AFAR
        metafunc.parametrize("kind", [*PARAMS, REMOTE] if is_reached else PARAMS, indirect=True)


@pytest.fixture
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[str(request.param)]


@pytest.fixture
def marker() -> str:
    """A number of seconds that nobody else on the machine sleeps, by which a ``sleep`` is found again."""
    return new_marker()
