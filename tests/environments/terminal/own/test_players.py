"""Own tasks in real sandboxes: the oracle earns 1, and the nop and all cheats earn 0."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import pytest

from envkit import registry
from envkit.wiring.env_check.tasks import check_tasks
from envkit.wiring.environments import find
from envkit.wiring.terminal import OWN_TASKS
from tests.sandbox.containers import image

EVERY = find("Terminal-v0").players
OF_A_SANDBOX = (
    *("oracle", "nop", "cheat:reward_files", "cheat:reward_daemon", "cheat:tests_folder", "cheat:system_programs"),
    *("cheat:search_tests", "cheat:own_first"),
)
"""Players that use more of the sandbox than the working directory, whose files are verified in the same way in all."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "backend", "players"),
    [
        pytest.param("lost-commit", "local", EVERY, marks=pytest.mark.bwrap, id="local"),
        # This task needs no packages besides Python.
        pytest.param("log-triage", "docker", OF_A_SANDBOX, marks=pytest.mark.docker, id="docker"),
    ],
)
def test_the_oracle_earns_1_and_every_cheat_0(
    name: str, backend: str, players: Collection[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = find("Terminal-v0")
    chosen = replace(spec, id="Chosen-v0", players={player: spec.players[player] for player in players})
    monkeypatch.setitem(registry._SPECS, chosen.id, chosen)
    options = {"tasks": str(OWN_TASKS / name), "image": image() if backend == "docker" else None}
    results, missing = check_tasks(chosen.id, tasks=1, repeat=1, options=options, backend=backend)
    assert [line for one in results for line in one.problems()] == []
    assert {one.player: one.successes for one in results} == {player: int(player == "oracle") for player in players}
    assert missing == []
