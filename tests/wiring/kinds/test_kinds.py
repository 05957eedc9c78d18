"""A package outside this repository adds parts of every family by entry point, without a change here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from envkit import clock, config
from envkit.config import evaluation, kinds
from envkit.errors import ConfigError, UsageError
from envkit.runs.display import SilentDisplay
from envkit.runs.files import read_rows
from envkit.trainer_bridge.run_folder import plots
from envkit.wiring.evaluation.policies import find_policy, kind_of
from envkit.wiring.training.agents import function_of
from envkit.wiring.training.run import train

OUTSIDE = """
seed: 3
env: {id: FrozenLake-v0, num_envs: 4, options: {size: 2, frozen: 1.0}}
sandbox: {kind: wrapped, label: ribbon}
engine: {kind: biased, favourite: right}
renderer: {kind: moves}
trainer: {kind: counting, steps: 3, groups_per_step: 4, checkpoint_every: 2, step_size: 0.5}
rollout: {group_size: 4, max_turns: 6}
evaluation: {episodes: 8, every: 2}
tracking: {to: [{kind: lines, file_name: lines.txt}]}
"""


@pytest.fixture
def installed(site: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package is installed for this process."""
    monkeypatch.syspath_prepend(site)
    return site


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(OUTSIDE)
    return path


COMMANDS = """
import json, sys
from envkit.cli import main

for words in json.loads(sys.argv[1]):
    try:
        main(words)
    except SystemExit as ended:
        assert ended.code == 0
print('torch' in sys.modules)
"""


def run(site: Path, *commands: list[str], cwd: Path) -> tuple[int, str, str]:
    """What commands print, and whether they have imported torch: the last line of the output."""
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS, json.dumps(commands)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


# --- Training --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_parts_of_a_package_are_checked_evaluated_and_trained_without_importing_torch(
    site: Path, file: Path, tmp_path: Path
) -> None:
    evaluation = ["eval", "FrozenLake-v0", "--episodes", "4", "--json", "--option", "size=2"]
    code, output, messages = run(
        site,
        ["check", str(file)],
        [*evaluation, "--policy", "always:down"],
        [*evaluation, "--policy", "always:sideways"],
        ["train", str(file), "--output", "run"],
        cwd=tmp_path,
    )
    assert code == 0, messages
    checked, down, sideways, *printed = output.splitlines()
    assert checked == "ok"
    for evaluated, valid in ((down, '"mean":1.0'), (sideways, '"mean":0.0')):
        assert f'"action_is_valid":{{{valid}' in evaluated
    assert printed[:2] == ["policy: engine biased", "sandbox: wrapped with ribbon"]
    assert "the engine is closed" in printed
    assert printed[-1] == "False"

    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    found = [(row["step"], row["counted"], row["policy_version"]) for row in rows]
    assert found == [(1, 16, 0), (2, 16, 1), (3, 16, 2)]
    assert not (tmp_path / "run" / "weights").exists()

    lines = (tmp_path / "run" / "lines.txt").read_text().splitlines()
    assert lines == [
        *("from 0, seed 3", "evaluation 0 eval_episodes", "step 1 16.0", "step 2 16.0"),
        *("evaluation 2 eval_episodes", "step 3 16.0", "evaluation 3 eval_episodes"),
    ]


def test_a_trainer_that_cannot_imitate_is_refused_before_a_run_is_replaced(installed: Path, tmp_path: Path) -> None:
    tiny = {"hidden_size": 16, "layers": 1, "device": "cpu"}
    content = {"env": {"id": "FrozenLake-v0"}, "engine": tiny, "trainer": {"kind": "counting"}}
    folder = tmp_path / "run"
    with pytest.raises(UsageError, match=r"^imitation\.kind: the trainer counting cannot imitate; "):
        clock.run(partial(train, config.parse(content), folder, resume=False, force=True, display=SilentDisplay()))
    assert not folder.exists()


@pytest.mark.slow
def test_a_loss_of_a_package_trains_the_tiny_policy_with_a_key_and_a_metric_of_its_own(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plots, "draw", lambda *_: None)  # takes longer than the run
    losses = {}
    for strength in (1.0, 0.25):
        content = {
            "seed": 3,
            "env": {"id": "FrozenLake-v0", "num_envs": 8, "options": {"size": 2, "frozen": 1.0}},
            "sandbox": {"kind": "none"},
            "engine": {"hidden_size": 16, "layers": 1, "device": "cpu"},
            "rollout": {"group_size": 4, "max_turns": 6},
            "algorithm": {"preset": "reinforce", "loss": {"kind": "scaled", "strength": strength}},
            "trainer": {"steps": 1, "groups_per_step": 4},
            "threads": 1,
            "evaluation": {"episodes": 0},
            "tracking": {"to": [], "trajectories_every": 0},
            "imitation": {"states": 20, "updates": 1, "check_episodes": 0},
        }
        folder = tmp_path / str(strength)
        run_of = partial(train, config.parse(content), folder, resume=False, force=False, display=SilentDisplay())
        clock.run(run_of)
        (row,) = read_rows(folder / "metrics.jsonl")
        assert isinstance(row["policy_loss"], float)
        assert row["strength"] == pytest.approx(strength)
        losses[strength] = row["policy_loss"]
    assert losses[1.0] != 0
    assert losses[0.25] == pytest.approx(losses[1.0] / 4)


# --- Evaluation ------------------------------------------------------------------------------------------------------


def test_a_policy_that_does_not_exist_is_refused_with_the_names_of_packages(installed: Path) -> None:
    assert kind_of("always") == ("always", "")
    assert kind_of("always:go: up") == ("always", "go: up")
    with pytest.raises(UsageError, match=r"^policy: there is no 'alwys:up'; did you mean 'always'\?$"):
        kind_of("alwys:up")
    with pytest.raises(UsageError, match=r"; there are: random, expert, .*, checkpoint:DIR, nop, always$"):
        kind_of("sonnet")


def test_an_agent_of_a_package_is_found_by_its_name(installed: Path) -> None:
    found = function_of("waiter")
    assert (found.__module__, found.__name__) == ("outside_kinds.parts", "wait")
    with pytest.raises(UsageError, match=r"^no agent is called 'waitr' \(.*\); did you mean 'waiter'\?$"):
        function_of("waitr")


def test_a_player_of_a_package_has_no_settings_of_a_language_model(installed: Path) -> None:
    described = evaluation.read("FrozenLake-v0", policy="always", temperature=1.0)
    with pytest.raises(ConfigError, match=r"^rollout.temperature: needs the policy .*; leave it out with always$"):
        find_policy(described, None)


# --- Checks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("engine.favorite=up", "engine.favorite: no such key; did you mean 'favourite'?"),
        ("engine.kind=biasd", "engine.kind: no engine is called 'biasd'; did you mean 'biased'?"),
        (
            "engine.kind=broken",
            "engine.kind: the engine 'broken' of the package outside-kinds cannot be imported: ModuleNotFoundError: ",
        ),
        (
            "engine.kind=bare",
            "engine.kind: the section class BareSection must extend envkit.config.parts.EngineSection",
        ),
        ("trainer.step_size=0", "trainer.step_size: must be above 0, got 0"),
        ("sandbox.lable=x", "sandbox.lable: no such key; did you mean 'label'?"),
        ("sandbox.kind=wraped", "sandbox.kind: no sandbox backend is called 'wraped'; did you mean 'wrapped'?"),
        ("tracking.to=[lines]", "tracking.to.0.file_name: is missing"),
        ("algorithm.loss=scald", "algorithm.loss.kind: no loss is called 'scald'; did you mean 'scaled'?"),
        ("algorithm.advantage=scaled", "algorithm.advantage.kind: no advantage is called 'scaled'; there are: "),
        (
            "algorithm={loss: {kind: scaled, strenght: 1}}",
            "algorithm.loss.strenght: no such key; did you mean 'strength'?",
        ),
    ],
)
def test_a_misspelt_name_is_a_problem_that_names_the_key_and_the_nearest_name(
    change: str, problem: str, installed: Path, file: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        config.load(file, [change])
    assert any(found.startswith(problem) for found in caught.value.problems)


def test_what_is_dumped_is_read_again_as_the_same(installed: Path, file: Path, tmp_path: Path) -> None:
    loaded = config.load(file)
    text = config.dump(loaded)
    assert "favourite: right" in text
    assert "file_name: lines.txt" in text
    (tmp_path / "again.yaml").write_text(text)
    assert config.load(tmp_path / "again.yaml") == loaded


def test_without_the_package_its_names_are_unknown(file: Path) -> None:
    assert kinds.names("engines") == ["transformers", "vllm"]
    with pytest.raises(UsageError, match=r"^no player is called 'always'$"):
        kinds.find("policies", "always")
    with pytest.raises(UsageError, match=r"^no agent is called 'waiter' \(import the module that registers it, "):
        function_of("waiter")
    with pytest.raises(ConfigError) as caught:
        config.load(file)
    assert [problem.partition(":")[0] for problem in caught.value.problems] == [
        *("sandbox.kind", "engine.kind", "renderer.kind", "trainer.kind", "tracking.to.0.kind")
    ]
