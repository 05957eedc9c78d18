"""Cheats in real sandboxes: each earns 0, and the fix earns 1."""

from __future__ import annotations

from pathlib import Path

import pytest

from envkit.checks.tasks import check_tasks
from envkit.environments.swe import Swe, SweTasks
from envkit.registry import register
from envkit.types import JSON
from envkit.wiring.environments import find
from envkit_cheats.swe import CHEATS
from tests.sandbox.containers import image

from .tiny import task_folder

BACKENDS = [pytest.param("local", marks=pytest.mark.bwrap), pytest.param("docker", marks=pytest.mark.docker)]


def with_some_cheats(backend: str) -> str:
    """Return an environment like SWE-v0; for containers, with every sixth cheat (all play in ``benchmarks/evidence``).

    The cheat ``hang`` is in test_grading.py, where the time limit is 1.5 s; here it is 22 s, and 66 s when repeated.
    """
    spec, env_id = find("SWE-v0"), f"SweWithSomeCheats{backend.title()}-v0"
    cheats = sorted(CHEATS.keys() - {"hang"})[:: 6 if backend == "docker" else 1]
    chosen = ["oracle", *(f"cheat:{name}" for name in cheats)]
    players = {name: spec.players[name] for name in chosen}
    data = dict(spec.data)
    register(env_id, Swe, needs={"sandbox"}, replayable=False, players=players, task_set=SweTasks, data=data)
    return env_id


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_fix_earns_1_and_every_cheat_0(backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = task_folder(tmp_path)
    monkeypatch.setenv("ENVKIT_DATA", str(tmp_path))
    options: dict[str, JSON] = {"tasks": str(folder), "image": image() if backend == "docker" else None}
    env_id = with_some_cheats(backend)
    results, missing = check_tasks(env_id, tasks=1, repeat=1, options=options, backend=backend)
    assert [line for one in results for line in one.problems()] == []
    players = [*find(env_id).players, "nop"]
    assert {one.player: one.successes for one in results} == {name: name == "oracle" for name in players}
    assert missing == []
