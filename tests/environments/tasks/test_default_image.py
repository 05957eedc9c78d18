"""The environments of the kit in containers of the default image: it has no answers, and some cheats earn 0.

All cheats play in ``benchmarks/evidence``, and in the sandboxes of the machine in the tests of each environment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from envkit.checks.tasks import check_tasks
from envkit.environments.code import Code, CodeTasks
from envkit.environments.swe import Swe, SweTasks
from envkit.environments.tasks import TaskEnv
from envkit.environments.terminal import Terminal, TerminalTasks
from envkit.environments.terminal.options import OWN_TASKS
from envkit.protocols import TaskSet
from envkit.registry import register
from envkit.types import JSON
from envkit.wiring.environments import find
from tests.environments.swe.tiny import task_folder
from tests.sandbox.containers import image


@pytest.mark.slow
@pytest.mark.docker
@pytest.mark.parametrize(
    ("env_id", "kind", "tasks", "cheats"),
    [
        ("SWE-v0", Swe, SweTasks, ("report_daemon", "site_packages")),
        ("Code-v0", Code, CodeTasks, ("daemon", "search_processes")),
        ("Terminal-v0", Terminal, TerminalTasks, ("reward_daemon", "system_programs")),
    ],
    ids=["swe", "code", "terminal"],
)
def test_the_default_image_pays_only_the_oracle(
    env_id: str,
    kind: type[TaskEnv],
    tasks: Callable[..., TaskSet],
    cheats: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    image()  # without it, there is no default image here
    monkeypatch.setenv("ENVKIT_DATA", str(tmp_path))
    options: Mapping[str, JSON] = {
        "SWE-v0": {"tasks": str(task_folder(tmp_path))},
        "Code-v0": {"mode": "tools"},
        "Terminal-v0": {"tasks": str(OWN_TASKS / "log-triage")},
    }[env_id]
    spec, few = find(env_id), f"{env_id.partition('-')[0]}InTheDefaultImage-v0"
    players = {name: spec.players[name] for name in ("oracle", *(f"cheat:{cheat}" for cheat in cheats))}
    register(few, kind, needs={"sandbox"}, replayable=False, players=players, task_set=tasks, data=dict(spec.data))
    results, missing = check_tasks(few, tasks=1, repeat=1, options=options, backend="docker")
    assert [line for one in results for line in one.problems()] == []
    assert {one.player: one.successes for one in results} == {name: int(name == "oracle") for name in (*players, "nop")}
    assert missing == []
