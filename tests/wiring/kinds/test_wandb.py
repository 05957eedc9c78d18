"""The tracker wandb, without a network: what its runs contain, where they lie, and that no process stays behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from envkit.config.parts import WandbSection
from envkit.errors import UsageError
from envkit.runs.files import read_rows
from envkit.trainer_bridge.run_folder.record import RunRecord
from envkit.wiring.contexts import TrackerContext
from envkit.wiring.training.kinds.trackers import open_wandb
from tests.programs.program import SCRIPT, Program, run
from tests.wiring.kinds.wandb_files import records

FILE = """
seed: 3
env: {id: FrozenLake-v0, num_envs: 4, options: {size: 2, frozen: 1.0}}
sandbox: {kind: none}
engine: {kind: biased}
renderer: {kind: moves}
trainer: {kind: counting, steps: 2, groups_per_step: 4, checkpoint_every: 2}
rollout: {group_size: 4, max_turns: 6}
evaluation: {episodes: 8, every: 2}
tracking: {to: [wandb]}
"""


@pytest.fixture
def place(tmp_path: Path, site: Path) -> tuple[Path, Mapping[str, str]]:
    """A working directory with a training file, and the environment variables of a user without other files."""
    (tmp_path / "home").mkdir()
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "lake.yaml").write_text(FILE)
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB_", "XDG_"))}
    fonts = str(Path.home() / ".cache" / "matplotlib")
    home = {"HOME": str(tmp_path / "home"), "MPLCONFIGDIR": fonts}
    tracked = {"WANDB_PROJECT": "lakes", "WANDB_RUN_GROUP": "small", "WANDB_TAGS": "one,two", "WANDB_MODE": "offline"}
    return tmp_path / "work", {**variables, **home, **tracked, "PYTHONPATH": str(site)}


def services(pid: int) -> list[str]:
    """The command lines of wandb's services that process `pid` started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode().split("\0")
        except OSError:
            continue
        if words[0].endswith("wandb-core") and str(pid) in words:
            found.append(" ".join(words))
    return found


def history(path: Path) -> list[dict[str, Any]]:
    rows = []
    for record in records(path):
        if record.HasField("history"):
            items = record.history.item
            rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return rows


@pytest.mark.slow
def test_a_run_is_stopped_by_ctrl_c_and_resumed_as_the_same_run_of_wandb(
    place: tuple[Path, Mapping[str, str]],
) -> None:
    work, variables = place
    command = [SCRIPT, "train", "lake.yaml", "--output", "run"]
    done = run(command, cwd=work, env=variables, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    assert "wandb" not in done.stdout

    command += ["--set", "trainer.steps=1000000", "--resume"]
    with Program(
        command, cwd=work, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    ) as process:
        try:
            while len(read_rows(work / "run" / "metrics.jsonl")) < 5 and process.poll() is None:
                time.sleep(0.05)  # noqa: TID251 - waits for another process
            assert services(process.pid)
        finally:
            os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C in a terminal does
            process.communicate(timeout=120)
    assert (process.returncode, services(process.pid)) == (130, [])

    assert {path.name for path in work.iterdir()} == {"lake.yaml", "run"}
    assert list((work.parent / "home").iterdir()) == []
    parts = sorted((work / "run" / "wandb").glob("offline-run-*/run-*.wandb"))
    (first, second) = [next(one.run for one in records(part) if one.HasField("run")) for part in parts]
    assert first.run_id == second.run_id
    assert second.resume
    assert (first.project, first.display_name, first.run_group, list(first.tags)) == (
        *("lakes", "run", "small"),
        ["one", "two"],
    )
    config = {item.key: json.loads(item.value_json) for item in first.config.update}
    assert (config["seed"], config["env"]["id"]) == (3, "FrozenLake-v0")

    rows = [row for part in parts for row in history(part)]
    train = [row for row in rows if "train/return" in row]
    expected = read_rows(work / "run" / "metrics.jsonl")
    assert [(row["step"], row["train/return"]) for row in train] == [(row["step"], row["return"]) for row in expected]
    evaluated = [(row["step"], row["evaluation/eval_return"]) for row in rows if "evaluation/eval_return" in row]
    rows_of_evaluations = read_rows(work / "run" / "evaluations.jsonl")
    assert evaluated == [(row["step"], row["eval_return"]) for row in rows_of_evaluations]

    RunRecord.create(work / "run", FILE, force=True).close()
    assert not (work / "run" / "wandb").exists()


KILLED = """
import sys, time
from pathlib import Path
from envkit.trainer_bridge.run_folder.wandb_run import WandbRun
run = WandbRun(Path("."), first_step=0, config={})
run.step(1, {"return": 0.5})
print("ready", flush=True)
time.sleep(600)
"""


def test_the_service_of_a_killed_run_ends(place: tuple[Path, Mapping[str, str]]) -> None:
    work, variables = place
    with subprocess.Popen([sys.executable, "-c", KILLED], cwd=work, env=variables, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        assert services(process.pid)
        process.kill()
    deadline = time.monotonic() + 60  # noqa: TID251 - another process's time
    while services(process.pid) and time.monotonic() < deadline:  # noqa: TID251
        time.sleep(0.1)  # noqa: TID251
    assert services(process.pid) == []


def test_without_an_api_key_the_error_names_both_ways_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    context = TrackerContext(section=WandbSection(), folder=tmp_path, first_step=0, config={})
    with pytest.raises(UsageError, match=r"wandb did not start a run: .*run `wandb login`, or set WANDB_MODE=offline"):
        open_wandb(context)
