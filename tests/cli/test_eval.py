"""``envkit eval``: success by difficulty, several attempts, and what is left in a folder."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import orjson
import pytest

from tests.cli.commands import called
from tests.programs.program import SCRIPT, Program, run

LAKE = ("eval", "FrozenLake-v0", "--policy", "random", "--option", "size=4")

PLAIN = """
import time

import gymnasium
import envkit
from envkit.spaces import Utf8Text

class Plain(gymnasium.Env):
    observation_space = action_space = Utf8Text(100)

    def reset(self, *, seed=None, options=None):
        return "go", {"legal_moves": ["on"]}

    def step(self, action):
        time.sleep(0.01)
        return "gone", 1.0, True, False, {}

def bring():
    envkit.register("Plain-v0", "plain:Plain")
"""

BOTH = ("parts/episodes.jsonl", "whole/episodes.jsonl")

pytestmark = pytest.mark.slow


def envkit(words: Sequence[str | Path], folder: Path, *, path: Path | None = None) -> tuple[int, str, str]:
    """Run a command in this process, or in another one with further packages in the folder `path`."""
    if path is None:
        return called(*words, cwd=folder)
    done = run([SCRIPT, *words], cwd=folder, env={**os.environ, "PYTHONPATH": str(path)})
    return done.returncode, done.stdout, done.stderr


def test_the_table_ends_with_success_by_the_shortest_solution(tmp_path: Path) -> None:
    words = ["eval", "FrozenLake-v0", "--policy", "expert", "--episodes", "10", "--option", "map=4x4"]
    code, out, _ = envkit([*words, "--split", "any"], tmp_path)
    assert code == 0
    heading, head, row = out.splitlines()[-3:]
    assert heading == "success by shortest solution"
    assert head.split() == ["moves", "mean", "95", "%", "interval", "episodes"]
    assert row.split() == ["6", "100.0%", "72.2%", "–", "100.0%", "10"]


def test_a_folder_gets_the_figures_and_keeps_them(tmp_path: Path) -> None:
    words = [*LAKE, "--episodes", "30", "--output", "found/here"]
    code, out, _ = envkit(words, tmp_path)
    folder = tmp_path / "found/here"
    assert (code, sorted(path.name for path in folder.iterdir())) == (
        0,
        ["arguments.json", "episodes.jsonl", "evaluation.json"],
    )
    assert out.splitlines()[-1] == "written: found/here/evaluation.json, found/here/episodes.jsonl"
    found = orjson.loads((folder / "evaluation.json").read_bytes())
    assert sum(row["episodes"] for row in found["by_difficulty"]) == found["episodes"] == 30

    again = envkit(words, tmp_path)
    refusal = "found/here: already holds an evaluation; replace it with --force or choose another folder\n"
    assert again == (2, "", refusal)
    assert envkit([*words, "--seed", "5", "--force"], tmp_path)[0] == 0
    assert orjson.loads((folder / "evaluation.json").read_bytes())["seed"] == 5


def test_the_object_that_is_printed_is_the_one_that_is_written(tmp_path: Path) -> None:
    code, out, err = envkit([*LAKE, "--episodes", "5", "--json", "--output", "found"], tmp_path)
    assert (code, out.count("\n")) == (0, 1)
    assert orjson.loads(out) == orjson.loads((tmp_path / "found/evaluation.json").read_bytes())
    assert err.splitlines()[-1].startswith("written: found/evaluation.json")


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A folder with an installed package that brings Plain-v0, which tells neither success nor difficulty."""
    path = tmp_path / "packages"
    metadata = path / "plain-1.0.dist-info"
    metadata.mkdir(parents=True)
    (path / "plain.py").write_text(PLAIN)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: plain\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[envkit.envs]\nplain = plain:bring\n")
    return path


def test_without_levels_of_known_difficulty_there_is_no_success_by_difficulty(tmp_path: Path, plain: Path) -> None:
    words = ["eval", "Plain-v0", "--policy", "random", "--episodes", "5", "--attempts", "2"]
    code, out, _ = envkit(words, tmp_path, path=plain)
    assert code == 0
    assert "success by" not in out
    assert "pass@" not in out


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["--policy", "openai:m@http://h", "--attempts", "2", "--greedy"],
            "evaluation.attempts: greedy play (rollout.temperature 0) makes all attempts at a task identical; sample, ",
        ),
        (["--force"], "--force replaces the evaluation in the folder --output; add --output, or leave out --force"),
        (["--output", "file"], "file: Not a directory; choose a folder that can be written"),
        (["--output", "file/x/y"], "file/x/y: Not a directory; choose a folder that can be written"),
        (["--output", "x" * 300], f"{'x' * 300}: File name too long; choose a folder that can be written"),
        (
            ["--compare", "a", "b"],
            "--compare takes two folders and nothing else; leave out ENV|FILE, --policy, ",
        ),
        (["--judge", "m@http://h"], "env.judge: FrozenLake-v0 needs no judge; leave it out"),
        (["--backend", "local"], "sandbox: FrozenLake-v0 does not use sandboxes as tools; leave it out"),
        (["--set", "env.weight=2"], "env.weight: is for training; leave it out"),
        (["--set", "evaluation.every=2"], "evaluation.every: is for training; leave it out"),
        (["--temperature", "1"], "rollout.temperature: needs the policy model:... or checkpoint:... or "),
        (["--output", "new/er", "--policy", "exprt"], "policy: there is no 'exprt'; did you mean 'expert'?"),
        (["--output", "new/er", "--option", "size=1"], "size: must be an integer from "),
        (
            ["--output", "new/er", "--option", "map=4x4"],
            "--split eval: applies to random lakes, not to a map; ",
        ),
    ],
)
def test_what_cannot_be_done_is_one_line_before_anything_is_played(tmp_path: Path, words: list[str], line: str) -> None:
    (tmp_path / "file").touch()
    code, out, err = envkit([*LAKE, *words], tmp_path)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(line)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_an_unknown_environment_is_named_beside_a_missing_policy(tmp_path: Path) -> None:
    code, _, err = envkit(["eval", "FrozenLak-v0"], tmp_path)
    assert (code, err.splitlines()) == (
        2,
        [
            "env.id: no environment is called 'FrozenLak-v0'; did you mean 'FrozenLake-v0'?",
            'policy: missing; name one, such as random, expert or model:smollm2-135m (--policy NAME, or policy="NAME")',
        ],
    )


def test_the_same_command_resumes_a_killed_evaluation(tmp_path: Path) -> None:
    """A command that is interrupted by Ctrl-C prints the figures so far, and this command."""
    words: list[str | Path] = [SCRIPT, *LAKE, "--episodes", "600", "--json", "--output"]
    code, whole, _ = envkit([*words[1:], "whole"], tmp_path)
    pipe, kept = subprocess.PIPE, 0
    for number in (signal.SIGKILL, signal.SIGINT):
        until = f"until test $(wc -l < parts/episodes.jsonl) -gt {kept}; do sleep 0.01; done 2> errors"
        with Program([*words, "parts"], cwd=tmp_path, stdout=pipe, stderr=pipe, text=True) as one:
            subprocess.run(["sh", "-c", until], cwd=tmp_path, timeout=300, check=True)
            one.send_signal(number)
            out, err = one.communicate(timeout=300)
        before, kept = kept, (tmp_path / "parts/episodes.jsonl").read_bytes().count(b"\n")
        assert before < kept < 600
    figures, hint = err.splitlines()[-2:]
    assert (one.returncode, out) == (130, "")
    assert re.fullmatch(rf"stopped after {kept} of 600 episodes, success .*; short episodes count too often\)", figures)
    command = " ".join(["envkit", *map(str, words[1:]), "parts"])
    assert hint == f"{kept} finished episodes saved in parts; continue with: {command}"
    again, parts, _ = envkit([*words[1:], "parts"], tmp_path)
    assert (code, again) == (0, 0)
    assert orjson.loads(parts)["metrics"] == orjson.loads(whole)["metrics"]
    found, expected = (re.sub(rb'"seconds":[^,}]*', b"", (tmp_path / name).read_bytes()) for name in BOTH)
    assert found == expected
