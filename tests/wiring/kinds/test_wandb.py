"""The tracker wandb, without a network: what its runs contain, where they lie, and that no process stays behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from envkit.config.parts import WandbSection
from envkit.errors import UsageError
from envkit.trainer_bridge.run_folder.record import RunRecord
from envkit.wiring.contexts import TrackerContext
from envkit.wiring.training.kinds.built_in import open_wandb
from tests.wiring.kinds.wandb_files import records


@pytest.fixture
def place(tmp_path: Path) -> tuple[Path, Mapping[str, str]]:
    """A working directory with the folder of a run, and the environment variables of a user without other files."""
    (tmp_path / "home").mkdir()
    RunRecord.create(tmp_path / "work" / "run", "", force=False).close()
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB_", "XDG_"))}
    tracked = {"WANDB_PROJECT": "lakes", "WANDB_RUN_GROUP": "small", "WANDB_TAGS": "one,two", "WANDB_MODE": "offline"}
    return tmp_path / "work", {**variables, "HOME": str(tmp_path / "home"), **tracked}


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


STARTS = """
import os, signal, sys, time
from pathlib import Path
from envkit.config.parts import WandbSection
from envkit.wiring.contexts import TrackerContext
from envkit.wiring.training.kinds.built_in import open_wandb

def open_run(first_step):
    config = {"seed": 3, "env": {"id": "FrozenLake-v0"}}
    return open_wandb(TrackerContext(section=WandbSection(), folder=Path("run"), first_step=first_step, config=config))

run = open_run(0)
run.evaluation(0, {"eval_return": 0.25})
run.step(1, {"return": 0.5})
"""
RESUMES = f"""{STARTS}
run.close()
run = open_run(2)
run.step(2, {{"return": 0.75}})
try:
    os.killpg(0, signal.SIGINT)  # as Ctrl-C in a terminal does
    time.sleep(60)
except KeyboardInterrupt:
    run.step(3, {{"return": 1.0}})
    run.close()
print("closed", flush=True)
sys.stdin.read()
"""
WAITS = f"""{STARTS}
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_a_resumed_run_is_the_same_run_of_wandb_and_ctrl_c_loses_none_of_it(
    place: tuple[Path, Mapping[str, str]],
) -> None:
    work, variables = place
    with subprocess.Popen(
        [sys.executable, "-c", RESUMES],
        cwd=work,
        env=variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "closed\n"
        assert services(process.pid) == []
        assert process.communicate(timeout=60)[0] == ""

    assert [path.name for path in work.iterdir()] == ["run"]
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
    found = [(row["step"], row.get("evaluation/eval_return"), row.get("train/return")) for row in rows]
    assert found == [(0, 0.25, None), (1, None, 0.5), (2, None, 0.75), (3, None, 1.0)]

    RunRecord.create(work / "run", "", force=True).close()
    assert not (work / "run" / "wandb").exists()


def test_the_service_of_a_killed_run_ends(place: tuple[Path, Mapping[str, str]]) -> None:
    work, variables = place
    with subprocess.Popen([sys.executable, "-c", WAITS], cwd=work, env=variables, stdout=subprocess.PIPE) as process:
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
