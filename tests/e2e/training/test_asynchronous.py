"""Asynchronous training while parts of it are killed: the run, and a sandbox of its environment.

The same many times: ``benchmarks/evidence/training/kills.py``.
"""

from __future__ import annotations

import json
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from envkit.types import stable_hash
from tests.contract.kinds import traces
from tests.e2e.training.accounts import accounts, key
from tests.e2e.training.terminals import train_and_kill
from tests.e2e.training.test_training import SMALL, lines, metrics, stop_when, train

pytestmark = pytest.mark.xdist_group("training")

GROUPS, SIZE = 4, SMALL["rollout"]["group_size"]
STEPS = 6
AHEAD: dict[str, Any] = {
    **SMALL,
    "rollout": {**SMALL["rollout"], "asynchronous": True},
    "trainer": {"steps": STEPS, "groups_per_step": GROUPS, "checkpoint_every": 2},
    "tracking": {"trajectories_every": 1, "trajectories": 1000, "to": []},
}


@pytest.mark.bwrap
def test_a_killed_run_trains_on_every_task_once_and_its_accounts_add_up(tmp_path: Path) -> None:
    """It is killed at any moment, on virtual time, in ``tests/trainer_bridge/scheduler``."""
    file, folder = tmp_path / "ahead.yaml", tmp_path / "run"
    file.write_text(yaml.safe_dump({**AHEAD, "sandbox": {"kind": "local"}}))
    code = stop_when(file, folder, kill, partial(has_lines, folder, 3))
    assert code == -signal.SIGKILL
    assert f"train {STEPS}/{STEPS}" in train(file, folder, "--resume")

    found = accounts(folder, steps=STEPS, groups=GROUPS, size=SIZE)
    assert (found["problems"], found["groups_void"]) == ([], 0)
    assert found["attempts"]["trained"] == STEPS * GROUPS * SIZE
    assert found["attempts"]["aborted"] > 0  # in progress at a kill
    assert found["lag_max"] <= 4
    assert found["lag_mean"] > 0
    trained = [seed for step in range(1, STEPS + 1) for seed in seeds(folder, step)]
    assert sorted(trained) == sorted(
        stable_hash(SMALL["seed"], "train", number) >> 33 for number in range(STEPS * GROUPS)
    )
    assert json.loads((folder / "summary.json").read_text())["diagnosis"] == []


@pytest.mark.bwrap
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may kill the processes of a sandbox")
def test_a_killed_sandbox_of_a_terminal_voids_its_episode_which_is_played_again(tmp_path: Path) -> None:
    steps, groups, size = 3, 2, 2
    before = traces()
    train_and_kill(tmp_path, {key(2, 1): 1}, steps=steps, groups=groups, size=size)
    assert traces() == before
    folder = tmp_path / "run"
    found = accounts(folder, steps=steps, groups=groups, size=size)
    assert found["problems"] == []
    assert found["attempts"] == {"asked": 13, "trained": 12, "voided": 1}
    (cause,) = found["void_by_cause"]
    assert cause.startswith("sandbox_lost: ")
    assert cause.endswith("killed by signal 9 (SIGKILL)")
    episodes = [one for step in range(1, steps + 1) for one in episodes_of(folder, step)]
    assert [one["outcome"]["grade"] for one in episodes] == [1.0, 0.0] * steps * groups
    assert metrics(folder)[1]["lag_mean"] > 0


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def has_lines(folder: Path, count: int) -> bool:
    return len(lines(folder)) >= count


def seeds(folder: Path, step: int) -> set[int]:
    """The seeds of the tasks that a train step trained on."""
    return {episode["seed"] for episode in episodes_of(folder, step)}


def episodes_of(folder: Path, step: int) -> list[dict[str, Any]]:
    """The episodes that a train step trained on."""
    return [json.loads(line) for line in (folder / "trajectories" / f"step-{step}.jsonl").read_text().splitlines()]
