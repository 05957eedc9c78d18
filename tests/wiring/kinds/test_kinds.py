"""A package outside this repository adds parts by entry point, without a change here.

A tracker, a player and a loss of a package are in docs/extend.md, whose package is played and trained with.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from envkit import clock, config
from envkit.config import kinds
from envkit.errors import ConfigError, UsageError
from envkit.runs.display import SilentDisplay
from envkit.runs.files import read_rows
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
tracking: {to: []}
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which pip has installed the package."""
    folder = tmp_path_factory.mktemp("site")
    options = ("--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--no-compile")
    package = str(Path(__file__).with_name("package"))
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, "--target", folder, package], check=True, timeout=120
    )
    return folder


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


@pytest.mark.slow
def test_parts_of_a_package_are_checked_and_train_without_importing_torch(
    site: Path, file: Path, tmp_path: Path
) -> None:
    commands = [["check", str(file)], ["train", str(file), "--output", "run"]]
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS, json.dumps(commands)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    checked, *printed = done.stdout.splitlines()
    assert checked == "ok"
    assert printed[:2] == ["policy: engine biased", "sandbox: wrapped with ribbon"]
    assert "the engine is closed" in printed
    assert printed[-1] == "False"

    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    found = [(row["step"], row["counted"], row["policy_version"]) for row in rows]
    assert found == [(1, 16, 0), (2, 16, 1), (3, 16, 2)]
    assert not (tmp_path / "run" / "weights").exists()


def test_a_trainer_that_cannot_imitate_is_refused_before_a_run_is_replaced(installed: Path, tmp_path: Path) -> None:
    tiny = {"hidden_size": 16, "layers": 1, "device": "cpu"}
    content = {"env": {"id": "FrozenLake-v0"}, "engine": tiny, "trainer": {"kind": "counting"}}
    folder = tmp_path / "run"
    with pytest.raises(UsageError, match=r"^imitation\.kind: the trainer counting cannot imitate; "):
        clock.run(partial(train, config.parse(content), folder, resume=False, force=True, display=SilentDisplay()))
    assert not folder.exists()


def test_an_agent_of_a_package_is_found_by_its_name(installed: Path) -> None:
    found = function_of("waiter")
    assert (found.__module__, found.__name__) == ("outside_kinds.parts", "wait")
    with pytest.raises(UsageError, match=r"^no agent is called 'waitr' \(.*\); did you mean 'waiter'\?$"):
        function_of("waitr")


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
        *("sandbox.kind", "engine.kind", "renderer.kind", "trainer.kind")
    ]
