"""Asynchronous training through the console script: killed, and resumed."""

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
from tests.e2e.training.test_training import SMALL, lines, metrics, stop_when, train

pytestmark = pytest.mark.xdist_group("training")

GROUPS = 4
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
    code, _ = stop_when(file, folder, kill, partial(has_lines, folder, 3))
    assert code == -signal.SIGKILL
    assert f"train {STEPS}/{STEPS}" in train(file, folder, "--resume")

    rows = metrics(folder)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert all(row["lag_max"] <= 4 for row in rows)
    assert any(row["lag_mean"] > 0 for row in rows)
    trained = [seed for step in range(1, STEPS + 1) for seed in seeds(folder, step)]
    assert sorted(trained) == sorted(
        stable_hash(SMALL["seed"], "train", number) >> 33 for number in range(STEPS * GROUPS)
    )

    summary = json.loads((folder / "summary.json").read_text())
    assert summary["diagnosis"] == []
    counts: dict[str, int] = summary["accounting"]
    tokens = {name: count for name, count in counts.items() if name.startswith("tokens_")}
    attempts = {name: count for name, count in counts.items() if name not in tokens}
    assert tokens.pop("tokens_sampled") == sum(tokens.values())
    assert attempts.pop("asked") == sum(attempts.values())
    assert counts["trained"] == STEPS * GROUPS * SMALL["rollout"]["group_size"]
    assert counts["aborted"] > 0  # in progress at a kill


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def has_lines(folder: Path, count: int) -> bool:
    return len(lines(folder)) >= count


def seeds(folder: Path, step: int) -> set[int]:
    """The seeds of the tasks that a train step trained on."""
    episodes = (folder / "trajectories" / f"step-{step}.jsonl").read_text().splitlines()
    return {json.loads(line)["seed"] for line in episodes}
