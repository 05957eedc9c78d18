"""Training on tool calls in sandboxes: the environment of the guide."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from envkit.runs import owners
from envkit.sandbox.host import run_dirs
from tests.docs.pages import GUIDE, LIFT, install
from tests.docs.pages import run as run_command
from tests.e2e.fleet.fleet import processes_of, serving
from tests.trainer_bridge.models import write_chat

pytestmark = [pytest.mark.bwrap, pytest.mark.xdist_group("training")]

PATIENCE_S = 300
"""After which a run hangs; on a machine where much else runs, training takes many times as long."""
TRAINING = {
    "env": {"id": "Totals-v0"},
    "sandbox": {"kind": "local"},
    "rollout": {"group_size": 2, "max_turns": 2, "max_tokens": 4096, "turn_tokens": 8},
    "trainer": {"steps": 1, "groups_per_step": 2, "threads": 1},
    "evaluation": {"episodes": 0},
    "tracking": {"to": []},
}


@pytest.mark.slow
@pytest.mark.limits
def test_the_sixty_lines_of_the_guide_are_evaluated_served_and_trained_on(tmp_path: Path) -> None:
    installed = install(GUIDE, LIFT, tmp_path)

    def success(policy: str, *words: str) -> float:
        command = ["-m", "envkit", "eval", "Totals-v0", "--policy", policy, "--episodes", "3", "--json", *words]
        printed = run_command(sys.executable, *command, cwd=tmp_path, PYTHONPATH=str(installed))
        (found,) = (json.loads(line) for line in printed.splitlines() if line.startswith("{"))
        assert (found["episodes"], found["void"]) == (3, 0)
        return float(found["metrics"]["success"]["mean"])

    assert (success("oracle", "--backend", "local"), success("nop", "--backend", "local")) == (1.0, 0.0)
    with serving("local", tmp_path, "envs.sandboxes=1", "envs.warm=0", environments=installed) as gateway:
        assert (success("oracle", "--url", gateway.url), success("nop", "--url", gateway.url)) == (1.0, 0.0)

    model = write_chat(tmp_path / "model", seed=5, max_tokens=4096)
    (tmp_path / "totals.yaml").write_text(json.dumps({**TRAINING, "engine": {"model": str(model)}}))
    command = [sys.executable, "-m", "envkit", "train", "totals.yaml", "--output", "run"]
    env = {**os.environ, "PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        owner = owners.owner_name(process.pid)
        output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, output.decode()
    fates: dict[str, int] = json.loads((tmp_path / "run" / "summary.json").read_text())["accounting"]
    assert fates.pop("begun") == fates["trained"] == sum(fates.values()) == 4
    assert processes_of(owner) == []
    assert not [folder for root in run_dirs.roots() for folder in root.glob(f"{owner}*")]
