"""Own tasks in real sandboxes: the oracle earns 1, and the nop and all cheats earn 0."""

from __future__ import annotations

import pytest

from envkit.checks.tasks import check_tasks
from envkit.environments.terminal.options import OWN_TASKS
from envkit.wiring.environments import find
from tests.sandbox.containers import image

EVERY = {*find("Terminal-v0").players, "nop"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "backend"),
    [
        pytest.param("lost-commit", "local", marks=pytest.mark.bwrap, id="local"),
        # This task needs no packages besides Python.
        pytest.param("log-triage", "docker", marks=pytest.mark.docker, id="docker"),
    ],
)
def test_the_oracle_earns_1_and_every_cheat_0(name: str, backend: str) -> None:
    options = {"tasks": str(OWN_TASKS / name), "image": image() if backend == "docker" else None}
    results, missing = check_tasks("Terminal-v0", tasks=1, repeat=1, options=options, backend=backend)
    assert [line for one in results for line in one.problems()] == []
    assert {one.player: one.successes for one in results} == {player: int(player == "oracle") for player in EVERY}
    assert missing == []
