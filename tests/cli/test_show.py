"""``envkit show``: what it prints of runs and evaluations, which episodes it chooses, and what it refuses."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest

from envkit.runs.files import replace_rows
from envkit.trainer_bridge.run_folder.record import RunRecord
from envkit.types import (
    EpisodeRecord,
    FinishReason,
    GenerationRecord,
    Observation,
    Outcome,
    Step,
    StopReason,
    TurnRecord,
)
from tests.cli.commands import called

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("cli-show")]


def shown(words: Sequence[str | Path], folder: Path, **env: str) -> str:
    code, out, err = called("show", *words, cwd=folder, **env)
    assert (code, err) == (0, "")
    return out


def numbers(page: str) -> list[int]:
    """The episodes that a page shows."""
    return [int(line.split()[1]) for line in page.splitlines() if line.startswith("episode ")]


def episode(*turns: TurnRecord, start: str = "P_G", **changes: Any) -> EpisodeRecord:
    stop, error = changes.pop("stop", StopReason.TERMINATED), changes.pop("error", None)
    reward, metrics = changes.pop("reward", 0.0), changes.pop("metrics", {"success": 0.0})
    cause = changes.pop("cause", None)
    outcome = Outcome.void(stop, error, cause) if stop.is_void else Outcome.score(stop, reward, metrics)
    usual: dict[str, Any] = {"env_id": "Mazes-v0", "seed": 5, "options": {}, "index": 0, "member": 0, "train_step": 1}
    values = {**usual, "outcome": outcome, "start": Observation(start), "start_info": {}, "turns": turns, **changes}
    return EpisodeRecord(**values)


def turn(action: str, seen: str, *, finish: FinishReason = FinishReason.STOP, prompt: str = "") -> TurnRecord:
    generation = GenerationRecord(
        prompt=prompt,
        completion=f"{action}<end>",
        finish=finish,
        prompt_ids=(1,),
        completion_ids=(2, 3),
        logprobs=(-0.5, -0.5),
        versions=((0, 2),),
        seconds=0.0,
    )
    return TurnRecord.of(action, Step(Observation(seen), 0.0, False, False, {}), generation)


def a_run(folder: Path, episodes: dict[int, list[EpisodeRecord]]) -> None:
    """Leave the run ``run`` with episodes of some train steps behind."""
    record = RunRecord.create(folder / "run", "seed: 7", force=False)
    for step, some in episodes.items():
        record.trajectories(step, some)
    record.close()


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two evaluations: ``expert`` on a lake that is always the same, and ``random`` on several."""
    folder = tmp_path_factory.mktemp("evaluated")
    bare = ["--option", "instructions=false", "--output"]
    words = ["eval", "FrozenLake-v0", "--policy", "expert", "--option", "map=4x4", "--split", "any", "--episodes", "1"]
    assert called(*words, *bare, "expert", cwd=folder)[0] == 0
    words = ["eval", "FrozenLake-v0", "--policy", "random", "--episodes", "10", "--attempts", "3"]
    assert called(*words, *bare, "random", cwd=folder)[0] == 0
    return folder


EXPERT_PAGE = """\
expert/episodes.jsonl: 1 episode of 1 task: 1 succeeded
FrozenLake-v0 map="4x4" instructions=false

episode 1  task 0 (seed {seed}), attempt 1  succeeded
reward 1, 6 turns, ended: terminated, shortest solution: 6 moves, action_is_valid 1, action_is_effective 1

  start      1. down    2. down    3. right   4. down    5. right   6. right
  P___       ____       ____       ____       ____       ____       ____
  _O_O       PO_O       _O_O       _O_O       _O_O       _O_O       _O_O
  ___O       ___O       P__O       _P_O       ___O       ___O       ___O
  O__G       O__G       O__G       O__G       OP_G       O_PG       O__√
                                                                    reward 1
"""


def test_the_boards_of_an_episode_stand_side_by_side_as_wide_as_the_terminal(evaluated: Path) -> None:
    seed = orjson.loads((evaluated / "expert/episodes.jsonl").read_bytes())["seed"]
    assert shown(["expert"], evaluated, COLUMNS="80") == EXPERT_PAGE.format(seed=seed)
    assert shown(["expert/episodes.jsonl"], evaluated, COLUMNS="80") == EXPERT_PAGE.format(seed=seed)

    narrow = shown(["expert"], evaluated, COLUMNS="35").splitlines()
    assert [line for line in narrow if "." in line and "_" not in line and "/" not in line] == [
        "  start      1. down    2. down",
        "  3. right   4. down    5. right",
        "  6. right",
    ]


def test_failed_shows_those_that_did_not_succeed(evaluated: Path) -> None:
    lines = (evaluated / "random/episodes.jsonl").read_bytes().splitlines()
    failed = [number for number, line in enumerate(lines, 1) if not orjson.loads(line)["outcome"]["success"]]
    assert 0 < len(failed) < 30
    page = shown(["random", "--failed", "--limit", "30"], evaluated)
    assert numbers(page) == failed
    assert "succeeded" not in "".join(page.splitlines(keepends=True)[1:])
    assert page.splitlines()[0].endswith(f": {30 - len(failed)} succeeded, {len(failed)} failed")
    assert shown(["expert", "--failed"], evaluated).splitlines()[-1] == "no failed episodes"


def test_a_few_episodes_one_or_all_attempts_at_a_task_are_shown(evaluated: Path) -> None:
    assert numbers(shown(["random", "--task", "4"], evaluated)) == [13, 14, 15]
    assert numbers(shown(["random", "--episode", "17"], evaluated)) == [17]
    page = shown(["random"], evaluated)
    assert numbers(page) == [1, 2, 3]
    assert page.splitlines()[-1] == "3 of 30 episodes shown; --limit 30 shows all"
    assert numbers(shown(["random", "--limit", "5"], evaluated)) == [1, 2, 3, 4, 5]


def test_a_run_shows_its_last_train_step_or_the_chosen_one(tmp_path: Path) -> None:
    a_run(tmp_path, {step: [episode(turn("x", "y"), train_step=step)] for step in (1, 9, 10)})
    assert shown(["run"], tmp_path).splitlines()[0].startswith("run/trajectories/step-10.jsonl: train step 10, 1 ep")
    assert shown(["run", "--step", "9"], tmp_path).splitlines()[0].startswith("run/trajectories/step-9.jsonl:")


LONG = "I look at the ice and think about it for a while.\n<answer>up</answer>"
PAGE = """\
run/trajectories/step-1.jsonl: train step 1, 1 episode of 1 task: 1 failed
Mazes-v0

episode 1  task 0 (seed 5), attempt 1  failed
reward 0, 2 turns, ended: max_turns

  start
  P_G

  1.
  action
    I look at the ice and think about it for a while.
    <answer>up</answer>
  observation
    _PG

  2. and yet another long thought that does not
  Your answer could not be read.
  _PG
  cut at the token limit
"""


def test_long_answers_stand_one_below_the_other_and_cut_ones_are_named(tmp_path: Path) -> None:
    cut = turn(
        "and yet another long thought that does not", "Your answer could not be read.\n_PG", finish=FinishReason.LENGTH
    )
    a_run(tmp_path, {1: [episode(turn(LONG, "_PG"), cut, stop=StopReason.MAX_TURNS)]})
    assert shown(["run"], tmp_path) == PAGE


def test_prompts_are_shown_as_the_model_had_them(tmp_path: Path) -> None:
    a_run(tmp_path, {1: [episode(turn("up", "_PG", prompt="<user>\nP_G\n<model>"))]})
    page = shown(["run", "--prompts"], tmp_path)
    assert page.splitlines()[6:] == [
        "  1.",
        "  prompt",
        "    <user>",
        "    P_G",
        "    <model>",
        "  completion",
        "    up<end>",
        "  observation",
        "    _PG",
    ]


def test_a_task_is_shown_with_its_name_and_a_failed_one_with_what_its_tests_printed(tmp_path: Path) -> None:
    output = "\n".join(f"line {number}" for number in range(30))
    failed = Outcome.score(StopReason.TERMINATED, 0.0, {}, grade=0.0, grader_output=output)
    solved = Outcome.score(StopReason.TERMINATED, 1.0, {}, grade=1.0, grader_output=output)
    a_run(tmp_path, {1: [episode(outcome=failed, start_info={"task": "fix-json"}), episode(outcome=solved, index=1)]})
    page = shown(["run"], tmp_path)
    assert "episode 1  task 0 (fix-json), attempt 1  failed" in page
    assert "episode 2  task 1 (seed 5), attempt 1  succeeded" in page
    assert page.count("the grader printed\n  line 10\n") == 1
    assert page.count("  line 29\n") == 1


def test_a_lost_episode_says_why(tmp_path: Path) -> None:
    lost = episode(turn("up", "_PG"), stop=StopReason.SANDBOX_LOST, error="sandbox a1 lost: oom-killed")
    a_run(tmp_path, {1: [lost, episode(metrics={})]})
    assert shown(["run", "--failed"], tmp_path).splitlines()[-1] == "no failed episodes"
    a_run(tmp_path / "again", {1: [lost]})
    lines = shown(["again/run"], tmp_path).splitlines()
    assert lines[0].endswith(": 1 lost")
    assert lines[3:6] == [
        "episode 1  task 0 (seed 5), attempt 1  lost",
        "1 turn, ended: sandbox_lost",
        "sandbox a1 lost: oom-killed",
    ]


def test_text_of_a_model_cannot_control_the_terminal(tmp_path: Path) -> None:
    a_run(tmp_path, {1: [episode(turn("\x1b[2Jup\r", "a\tb\x07\u202e"), start="[bold]x[/]")]})
    page = shown(["run"], tmp_path, FORCE_COLOR="1", NO_COLOR="1")
    assert "\\x1b[2Jup\\r" in page
    assert "a   b\\x07\\u202e" in page
    assert "[bold]x[/]" in page


def test_a_terminal_gets_colours_and_no_line_beyond_its_width(tmp_path: Path) -> None:
    text = f"  {'a long rule of this game ' * 8}\nP_G"
    a_run(tmp_path, {1: [episode(turn("up", "_PG"), start=text)]})
    plain = shown(["run"], tmp_path, COLUMNS="50")
    assert max(map(len, plain.splitlines())) > 150
    assert "\x1b" not in plain

    coloured = shown(["run"], tmp_path, COLUMNS="50", FORCE_COLOR="1", TERM="xterm-256color", NO_COLOR="")
    assert "\x1b[1;31mfailed\x1b[0m" in coloured
    lines = re.sub(r"\x1b\[[0-9;]*m", "", coloured).splitlines()
    wrapped = [line for line in lines if "rule" in line]
    assert len(wrapped) == 4
    assert max(map(len, lines[1:])) <= 50


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["nowhere"], "nowhere: no such folder or file; name a run, such as runs/quickstart, or one of its files"),
        (["."], ".: has no episodes; name the folder of envkit train or of envkit eval --output"),
        (["begun"], "begun: this run has not recorded episodes yet; wait for its first train step, or set "),
        (
            ["run", "--step", "2"],
            "run: train step 2 is not recorded; recorded are 1, 5, 10, 15, 20, 25, 30, 35",
        ),
        (["evaluation", "--step", "1"], "evaluation/episodes.jsonl: its episodes belong to no train step; leave out "),
        (["run", "--episode", "2"], "--episode 2: the last episode of run/trajectories/step-65.jsonl has number 1"),
        (["run", "--task", "7"], "--task 7: run/trajectories/step-65.jsonl has no episode of this task; its tasks are"),
        (["evaluation", "--prompts"], "--prompts: evaluation/episodes.jsonl has no prompts, since no model"),
    ],
)
def test_input_that_cannot_be_shown_is_one_line_and_exit_code_2(words: list[str], line: str, tmp_path: Path) -> None:
    a_run(tmp_path, {step: [episode(turn("up", "_PG"))] for step in (1, *range(5, 70, 5))})
    (tmp_path / "run").rename(tmp_path / "kept")
    a_run(tmp_path, {})
    (tmp_path / "run").rename(tmp_path / "begun")
    (tmp_path / "kept").rename(tmp_path / "run")
    (tmp_path / "evaluation").mkdir()
    replace_rows(tmp_path / "evaluation/episodes.jsonl", [episode()])

    code, out, err = called("show", *words, cwd=tmp_path)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(line)
