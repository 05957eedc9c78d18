"""Cheats in real sandboxes: each earns 0, and the fix earns 1."""

from __future__ import annotations

from pathlib import Path

import pytest

from envkit.checks.tasks import check_tasks
from envkit.environments.swe import Swe, SweTasks
from envkit.registry import register
from envkit.types import JSON
from envkit.wiring.environments import find

from .tiny import task_folder

ENV_ID = "SweWithoutHang-v0"


def without_hang() -> None:
    """Register an environment like SWE-v0 with all cheats but ``hang``.

    That cheat is in test_grading.py, where the time limit is 1.5 s; here it is 22 s, and 66 s when repeated.
    """
    spec = find("SWE-v0")
    players = {name: player for name, player in spec.players.items() if name != "cheat:hang"}
    data = dict(spec.data)
    register(ENV_ID, Swe, needs={"sandbox"}, replayable=False, players=players, task_set=SweTasks, data=data)


@pytest.mark.slow
@pytest.mark.bwrap
def test_the_fix_earns_1_and_every_cheat_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In containers, some cheats play in ``tests/environments/tasks``, and all in ``benchmarks/evidence``."""
    folder = task_folder(tmp_path)
    monkeypatch.setenv("ENVKIT_DATA", str(tmp_path))
    without_hang()
    options: dict[str, JSON] = {"tasks": str(folder)}
    results, missing = check_tasks(ENV_ID, tasks=1, repeat=1, options=options, backend="local")
    assert [line for one in results for line in one.problems()] == []
    players = [*find(ENV_ID).players, "nop"]
    assert {one.player: one.successes for one in results} == {name: name == "oracle" for name in players}
    assert missing == []
