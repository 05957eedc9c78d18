"""End-to-end training through the console script: sandbox, protocol, policy, trainer, and the files of the run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
import yaml

import envkit
from envkit import clock
from tests.cli.commands import called
from tests.programs.program import SCRIPT, Program

pytestmark = pytest.mark.xdist_group("training")

PATIENCE_S = 400
"""After which a program hangs; on a machine where much else runs, training takes many times as long."""

SMALL: dict[str, Any] = {
    "seed": 3,
    "env": {"id": "FrozenLake-v0", "num_envs": 16, "options": {"size": 3}},
    "engine": {"hidden_size": 16, "layers": 1},
    "rollout": {"group_size": 4, "max_turns": 10, "max_tokens": 256},
    "algorithm": {"preset": "grpo"},
    "trainer": {"steps": 6, "groups_per_step": 2, "checkpoint_every": 2}, "threads": 1,
    "evaluation": {"episodes": 4, "every": 3},
    "imitation": {"states": 50, "updates": 18, "batch": 8, "check_episodes": 4},
    "tracking": {"trajectories_every": 3},
}  # fmt: skip


def train(file: Path, folder: Path, *words: str) -> str:
    """Train in this process; return the output. Runs that are stopped have a process of their own."""
    code, output, errors = called("train", file, "--output", folder, *words)
    assert code == 0, errors
    return output


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The metrics, without times and memory."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [
        {key: value for key, value in json.loads(line).items() if not key.endswith(("_s", "_mib"))} for line in lines
    ]


def evaluations(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "evaluations.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("file") / "small.yaml"
    path.write_text(yaml.safe_dump(SMALL))
    return path


@pytest.fixture(scope="module")
def unbroken(file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "unbroken"
    train(file, folder)
    return folder


def test_a_run_writes_all_documented_files(unbroken: Path) -> None:
    summary = json.loads((unbroken / "summary.json").read_text())
    assert summary["env_id"] == "FrozenLake-v0"
    assert summary["algorithm"] == "grpo"
    assert summary["train_steps"] == 6
    assert summary["episodes"] == 6 * 2 * 4
    assert summary["lost_episodes"] == 0
    assert summary["eval_episodes"] == 4
    episodes = {name: count for name, count in summary["accounting"].items() if count and "tokens" not in name}
    assert episodes == {"asked": 6 * 2 * 4, "trained": 6 * 2 * 4}
    assert summary["diagnosis"] == []
    for key in ("eval_success_before", "eval_success_after", "eval_greedy_before", "eval_greedy_after"):
        assert 0.0 <= summary[key] <= 1.0
    assert [line["step"] for line in metrics(unbroken)] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in evaluations(unbroken)] == [0, 3, 6]
    assert sorted(path.name for path in (unbroken / "plots").iterdir()) == ["learning_curve.png", "training.png"]
    assert sorted(path.name for path in (unbroken / "checkpoints").iterdir()) == ["step-4", "step-6"]
    episode = json.loads((unbroken / "trajectories" / "step-3.jsonl").read_text().splitlines()[0])
    assert episode["options"]["split"] == "train"


@pytest.mark.bwrap
def test_killing_the_sandbox_costs_only_its_episodes(unbroken: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    content = {**SMALL, "sandbox": {"kind": "local"}, "trainer": {**SMALL["trainer"], "steps": 4}}

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(clock.to_thread, partial(envkit.train, content, output=folder))
            with anyio.fail_after(PATIENCE_S):
                while not lines(folder):  # noqa: ASYNC110
                    await anyio.sleep(0.01)
            kill_server_below(os.getpid())

    clock.run(main)
    assert len(lines(folder)) == 4
    assert learned(folder) == learned(unbroken)[:4]
    assert not servers_below(os.getpid())


def test_a_killed_run_loses_nothing_since_its_last_checkpoint(file: Path, unbroken: Path, tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    code = stop_when(file, folder, lambda pid: os.kill(pid, signal.SIGKILL), lambda: len(lines(folder)) >= 3)
    assert code == -signal.SIGKILL
    with (folder / "metrics.jsonl").open("a") as rows:
        rows.write('{"step": 99, "succ')  # a kill can fall into the middle of a line
    assert "train 6/6" in train(file, folder, "--resume")
    assert metrics(folder) == metrics(unbroken)
    assert evaluations(folder) == evaluations(unbroken)


def lines(folder: Path) -> list[str]:
    """The run's metrics so far."""
    path = folder / "metrics.jsonl"
    return path.read_text().splitlines() if path.exists() else []


def processes() -> dict[int, int]:
    """Every process of the machine and its parent."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            found[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it ended while we looked
    return found


def children(pid: int) -> list[int]:
    """Processes below `pid`, at any depth."""
    parents = processes()
    below = [pid]
    for process in below:
        below += [child for child, parent in parents.items() if parent == process]
    return below[1:]


def servers_below(pid: int) -> list[int]:
    """Return the processes below `pid` of a server in a sandbox, which must be other processes than the run."""
    return [child for child in children(pid) if b"envkit.wiring.env_server" in cmdline(child)]


def kill_server_below(pid: int) -> None:
    os.kill(servers_below(pid)[-1], signal.SIGKILL)


def cmdline(pid: int) -> bytes:
    """The words of a process, which may have ended meanwhile."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def learned(folder: Path) -> list[dict[str, Any]]:
    """The metrics, without the counts of lost episodes."""
    lost = ("lost", "episodes_asked", "episodes_voided")
    return [{key: row[key] for key in row if not key.startswith(lost)} for row in metrics(folder)]


def stop_when(file: Path, folder: Path, act: Callable[[int], None], ready: Callable[[], bool], *words: str) -> int:
    """Start a run, `act` on its process as soon as it is `ready`, and check that it leaves no process behind.

    Its process has another hash seed than this one.
    """
    env = {**os.environ, "PYTHONHASHSEED": "1"}

    async def main() -> int:
        command = [SCRIPT, "train", str(file), "--output", str(folder), *words]
        with (
            Program(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process,
            anyio.fail_after(PATIENCE_S),
        ):
            while not ready():
                assert process.poll() is None, "it ended before it was to be stopped"
                await anyio.sleep(0.05)
            below = children(process.pid)
            act(process.pid)
            code = await clock.to_thread(process.wait)
            while set(below) & set(processes()):  # noqa: ASYNC110  (the kernel tells only their parent)
                await anyio.sleep(0.05)
        return code

    return clock.run(main)
