"""The whole path through the console script: a sandbox, the protocol, a policy, a trainer, and what is left behind."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
import yaml

from envkit import clock

SMALL = {
    "seed": 3,
    "env": {"id": "FrozenLake-v0", "num_envs": 32, "options": {"size": 3}},
    "engine": {"hidden_size": 32, "layers": 2, "heads": 2},
    "rollout": {"group_size": 4, "max_turns": 10, "max_tokens": 256},
    "algorithm": {"preset": "grpo"},
    "trainer": {"steps": 6, "groups_per_step": 8, "checkpoint_every": 2, "threads": 1},
    "evaluation": {"episodes": 32, "every": 3},
    "warmup": {
        "lesson_states": 500, "lesson_updates": 30, "strung_updates": 10, "lesson_batch": 64,
        "episode_updates": 10, "episode_batch": 16, "check_every": 5, "check_episodes": 32,
    },
    "tracking": {"trajectories_every": 3, "trajectories": 4},
}  # fmt: skip


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "envkit", *words]


def train(file: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command("train", str(file), "--output", str(folder), *words), capture_output=True, text=True, timeout=100
    )


def metrics(folder: Path) -> list[dict[str, Any]]:
    """What was measured, without what depends on the machine's speed."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if not key.endswith("_s")} for line in lines]


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
    done = train(file, folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_a_run_leaves_behind_all_that_it_promises(unbroken: Path) -> None:
    summary = json.loads((unbroken / "summary.json").read_text())
    assert summary["env_id"] == "FrozenLake-v0"
    assert summary["algorithm"] == "grpo"
    assert summary["train_steps"] == 6
    assert summary["episodes"] == 6 * 8 * 4
    assert summary["lost_episodes"] == 0
    assert summary["eval_episodes"] == 32
    for key in ("eval_success_before", "eval_success_after", "eval_greedy_before", "eval_greedy_after"):
        assert 0.0 <= summary[key] <= 1.0
    assert [line["step"] for line in metrics(unbroken)] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in evaluations(unbroken)] == [0, 3, 6]
    assert sorted(path.name for path in (unbroken / "plots").iterdir()) == ["learning_curve.png", "training.png"]
    assert sorted(path.name for path in (unbroken / "checkpoints").iterdir()) == ["step-4", "step-6"]
    episode = json.loads((unbroken / "trajectories" / "step-3.jsonl").read_text().splitlines()[0])
    assert episode["task"]["options"]["split"] == "train"


def test_the_games_ran_on_the_other_side_of_a_process_boundary(file: Path, tmp_path: Path) -> None:
    done = train(file, tmp_path / "run", "--set", "trainer.steps=0", "--set", "sandbox.kind=process")
    assert done.returncode == 0, done.stderr
    assert "plain child process" in done.stdout


def test_a_checkpoint_can_be_evaluated(unbroken: Path) -> None:
    words = ["eval", "FrozenLake-v0", "--policy", f"checkpoint:{unbroken}", "--episodes", "16", "--json"]
    done = subprocess.run(
        command(*words, "--option", "size=3", "--option", "instructions=false"),
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["episodes"] == 16


def test_a_finished_run_is_not_overwritten(file: Path, unbroken: Path) -> None:
    before = (unbroken / "metrics.jsonl").read_bytes()
    done = train(file, unbroken)
    assert done.returncode == 2
    assert "--resume" in done.stderr
    assert "--force" in done.stderr
    assert (unbroken / "metrics.jsonl").read_bytes() == before


def test_a_killed_run_goes_on_to_the_last_digit(file: Path, unbroken: Path, tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    stop_when(file, folder, signal.SIGKILL, lambda: len(lines(folder / "metrics.jsonl")) >= 3)
    # A kill can fall into the middle of a line.
    with (folder / "metrics.jsonl").open("a") as half:
        half.write('{"step": 99, "succ')
    done = train(file, folder, "--resume")
    assert done.returncode == 0, done.stderr
    assert metrics(folder) == metrics(unbroken)
    assert evaluations(folder) == evaluations(unbroken)


def test_ctrl_c_stops_cleanly_with_a_checkpoint(file: Path, unbroken: Path, tmp_path: Path) -> None:
    folder = tmp_path / "stopped"
    code, stdout = stop_when(file, folder, signal.SIGINT, lambda: len(lines(folder / "metrics.jsonl")) >= 1)
    assert code == 130
    assert "--resume" in stdout
    done_steps = len(lines(folder / "metrics.jsonl"))
    assert (folder / "checkpoints" / f"step-{done_steps}").is_dir()
    done = train(file, folder, "--resume")
    assert done.returncode == 0, done.stderr
    assert metrics(folder) == metrics(unbroken)


def test_resume_refuses_another_configuration(file: Path, unbroken: Path) -> None:
    done = train(file, unbroken, "--resume", "--set", "trainer.learning_rate=0.1")
    assert done.returncode == 2
    assert done.stderr.startswith("trainer.learning_rate:")


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def children(pid: int) -> list[int]:
    """Processes below `pid`, at any depth."""
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it ended while we looked
        if int(fields[1]) == pid:
            child = int(path.parent.name)
            found += [child, *children(child)]
    return found


def stop_when(file: Path, folder: Path, signum: signal.Signals, ready: Callable[[], bool]) -> tuple[int, str]:
    """Start a run, send it `signum` as soon as it is `ready`, and check that it leaves no process behind."""

    async def main() -> tuple[int, str]:
        async with await anyio.open_process(
            command("train", str(file), "--output", str(folder)), stderr=subprocess.STDOUT
        ) as process:
            with anyio.fail_after(90):
                while not ready():
                    assert process.returncode is None, "it ended before it was to be stopped"
                    await anyio.sleep(0.05)
                below = children(process.pid)
                process.send_signal(signum)
                code = await process.wait()
                assert process.stdout is not None
                printed = b"".join([chunk async for chunk in process.stdout]).decode()
                while any(Path(f"/proc/{child}").exists() for child in below):
                    await anyio.sleep(0.05)
            return code, printed

    return clock.run(main)
