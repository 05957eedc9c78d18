"""Every kind of sandbox on this machine, for the tests of what they all promise."""

from __future__ import annotations

import pytest

from tests.contract.kinds import KINDS, LOCAL, PARAMS, Kind, new_marker
from tests.contract.shared import Shared, SharedSandboxes, sandboxes

__all__ = ["sandboxes"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    chosen = [mark for mark in metafunc.definition.iter_markers("parametrize") if "kind" in mark.args[0]]
    if "kind" in metafunc.fixturenames and not chosen:
        kinds = LOCAL if metafunc.definition.path.parent.name == "programs" else PARAMS
        metafunc.parametrize("kind", kinds, indirect=True)


@pytest.fixture
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[str(request.param)]


@pytest.fixture
def shared(kind: Kind, sandboxes: SharedSandboxes) -> Shared:
    """The shared sandbox of the case's kind."""
    return Shared(sandboxes, kind)


@pytest.fixture
def marker() -> str:
    """A number of seconds that nobody else on the machine sleeps, by which a ``sleep`` is found again."""
    return new_marker()
