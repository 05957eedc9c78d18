"""`envkit train` from its file to its folder, with a policy so tiny that it learns nothing but is quick about it."""

from __future__ import annotations

import shlex
import shutil
import signal
import subprocess
from pathlib import Path

import orjson
import pytest

from envkit.runs.files import read_rows
from tests.cli.commands import called
from tests.programs.program import SCRIPT, Program

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("cli-train")]

FILE = """
env: {id: FrozenLake-v0, num_envs: 16, options: {size: 3}}
sandbox: {kind: none}
engine: {hidden_size: 16, layers: 1}
rollout: {group_size: 2, max_turns: 8, max_tokens: 256}
threads: 1
trainer: {steps: 2, groups_per_step: 8, learning_rate: 0.001}
evaluation: {episodes: 32, every: 1000}
imitation: {states: 50, updates: 24, batch: 16, check_episodes: 16}
"""


Trained = tuple[Path, tuple[int, str, str]]
"""A folder with a finished run, and the command's exit code, output and errors."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("trained")
    (folder / "lake.yaml").write_text(FILE)
    return folder, called("train", "lake.yaml", cwd=folder)


def test_a_run_ends_with_a_short_table_and_says_where_its_files_are(trained: Trained) -> None:
    folder, (code, output, errors) = trained
    assert (code, errors) == (0, "")
    rows = dict(line.split("  ", 1) for line in output.rpartition("\n\n")[2].splitlines())
    assert rows["train steps"].strip() == "2"
    assert rows["episodes"].strip() == "32, 0 of them lost"
    assert rows["files"].strip() == "runs/lake"
    run = folder / "runs/lake"
    assert [row["step"] for row in read_rows(run / "metrics.jsonl")] == [1, 2]
    assert (run / "plots/learning_curve.png").exists()


def test_eval_of_the_run_gives_the_success_that_the_run_measured(trained: Trained) -> None:
    folder, _ = trained
    summary = orjson.loads((folder / "runs/lake/summary.json").read_bytes())
    words = ["eval", "FrozenLake-v0", "--policy", "checkpoint:runs/lake", "--episodes", "32", "--json"]
    found = orjson.loads(called(*words, cwd=folder)[1])
    assert found["metrics"]["success"]["mean"] == summary["eval_success_after"]
    assert found["options"] == {"size": 3, "instructions": False, "split": "eval"}


def test_every_file_of_a_run_can_be_read_by_the_same_people(trained: Trained) -> None:
    files = [path for path in (trained[0] / "runs/lake").rglob("*") if path.is_file()]
    assert {path.suffix for path in files} > {".safetensors", ".jsonl", ".pt"}
    assert len({path.stat().st_mode for path in files}) == 1


def test_a_run_and_an_evaluation_of_it_record_episodes_in_the_same_format_and_both_can_be_shown(
    trained: Trained,
) -> None:
    folder, _ = trained
    words = ["eval", "FrozenLake-v0", "--policy", "checkpoint:runs/lake", "--episodes", "4", "--attempts", "2"]
    assert called(*words, "--output", "found", cwd=folder)[0] == 0
    played = [orjson.loads(line) for line in (folder / "runs/lake/trajectories/step-2.jsonl").read_bytes().splitlines()]
    found = [orjson.loads(line) for line in (folder / "found/episodes.jsonl").read_bytes().splitlines()]
    assert [one["index"] for one in played] == [0, 1, 2, 3, 4, 5, 6, 7]
    assert [(one["index"], one["member"]) for one in found] == [(task, again) for task in range(4) for again in (0, 1)]
    for key in (dict.keys, lambda one: one["turns"][0].keys(), lambda one: one["turns"][0]["generation"].keys()):
        assert len({tuple(key(one)) for one in played + found}) == 1
    for one in played + found:
        assert one["turns"][0]["generation"]["prompt"] == f"<s>{one['start']['text']}\n<answer>"

    for place in ("runs/lake", "found"):
        code, shown, errors = called("show", place, "--limit", "8", cwd=folder)
        assert (code, errors) == (0, "")
        assert sum(line.startswith("episode ") for line in shown.splitlines()) == 8


def test_a_run_whose_episodes_all_end_alike_prints_a_warning_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "lake.yaml").write_text(FILE)
    # Nearly greedy sampling plays the same episode for all members of a group.
    small = ("evaluation.episodes=0", "imitation.check_episodes=0", "trainer.groups_per_step=2")
    words = [word for change in ("rollout.temperature=0.0001", *small) for word in ("--set", change)]
    code, output, errors = called("train", "lake.yaml", *words, cwd=tmp_path)
    assert (code, errors) == (0, "")
    (finding,) = orjson.loads((tmp_path / "runs/lake/summary.json").read_bytes())["diagnosis"]
    assert (finding["name"], finding["last_step"]) == ("every_group_filtered", 2)
    assert finding["line"].startswith(
        "nothing to learn in the last 2 train steps: all episodes of each group had the same return"
    )
    assert output.splitlines()[-1] == f"warning: every_group_filtered (train step 2): {finding['line']}"


def test_an_interrupted_run_keeps_its_last_step_and_prints_the_command_that_resumes(tmp_path: Path) -> None:
    (tmp_path / "lake.yaml").write_text(FILE)
    settings = (
        *("trainer.steps=100000", "trainer.groups_per_step=1", "evaluation.episodes=0"),
        *("imitation.states=8", "imitation.updates=1", "imitation.check_episodes=0"),
    )
    words = ["train", "lake.yaml", "--output", "run", *(word for one in settings for word in ("--set", one))]
    with Program([SCRIPT, *words], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            until_it_trains = "until test -s run/metrics.jsonl; do sleep 0.3; done"
            subprocess.run(["sh", "-c", until_it_trains], cwd=tmp_path, timeout=300, check=True)
            process.send_signal(signal.SIGINT)
            out, errors = process.communicate(timeout=300)
        finally:
            process.kill()

    assert (process.returncode, errors) == (130, "")
    steps = [row["step"] for row in read_rows(tmp_path / "run/metrics.jsonl")]
    before, _, again = out.splitlines()[-1].partition(" continue with: ")
    assert before == f"stopped after train step {steps[-1]};"
    program, *words_again = shlex.split(again)
    assert Path(shutil.which(program) or "").samefile(SCRIPT)
    assert words_again == [*words, "--resume"]
    assert (tmp_path / f"run/checkpoints/step-{steps[-1]}").exists()


def test_a_run_of_another_format_is_refused_by_each_command_that_reads_it(trained: Trained, tmp_path: Path) -> None:
    folder, _ = trained
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "runs/lake/format.json").write_text('{"format": 2}')
    message = (
        "runs/lake: holds a run of another format (found 2; this version of envkit reads 1); "
        "use the version of envkit that wrote it, or another folder\n"
    )

    for words in (
        ["train", "lake.yaml", "--resume", "--set", "trainer.steps=3"],
        ["train", "lake.yaml", "--force"],
        ["eval", "FrozenLake-v0", "--policy", "checkpoint:runs/lake"],
        ["show", "runs/lake"],
    ):
        code, _, errors = called(*words, cwd=tmp_path)
        assert (code, errors) == (2, message), words
