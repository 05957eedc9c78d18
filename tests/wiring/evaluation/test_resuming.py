"""An evaluation in a folder goes on where it stopped, with the results of one that was never interrupted."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import orjson
import pytest

import envkit
from envkit import clock
from envkit.config import evaluation
from envkit.errors import UsageError
from envkit.runs.display import SilentDisplay
from envkit.spaces import Utf8Text
from envkit.trainer_bridge.evaluation.report import EvaluationFolder
from envkit.trainer_bridge.evaluation.result import Evaluation
from envkit.types import EpisodeRecord, Info
from envkit.wiring.evaluation.evaluate import evaluate
from tests.trainer_bridge.models import write_chat

EPISODES = 12


class StoppedError(Exception):
    """Stands for whatever ends an evaluation early."""


def evaluated(
    place: Path,
    policy: str = "random",
    *,
    stop_after: int | None = None,
    force: bool = False,
    env_id: str = "FrozenLake-v0",
    overrides: Sequence[str] = (),
    **settings: Any,
) -> tuple[Evaluation, list[tuple[int, int]]]:
    """Evaluate with a folder; return what was found and which episodes were played."""
    folder = EvaluationFolder(place, force=force)
    played: list[tuple[int, int]] = []

    def add(episode: EpisodeRecord) -> None:
        folder.add(episode)
        played.append((episode.index, episode.member))
        if len(played) == stop_after:
            raise StoppedError

    options = (
        {"instructions": False, **settings.pop("options", {})}
        if env_id == "FrozenLake-v0"
        else settings.pop("options", {})
    )
    usual = {"policy": policy, "episodes": EPISODES, "attempts": 2, "seed": 3, "options": options}
    described = evaluation.read(env_id, overrides, **{**usual, **settings})
    found = clock.run(partial(evaluate, described, display=SilentDisplay(), kept=folder.begin, on_episode=add))
    folder.finish(found)
    return found, played


def stopped(place: Path, policy: str = "random", *, after: int, **arguments: Any) -> None:
    with pytest.raises((StoppedError, BaseExceptionGroup)):
        evaluated(place, policy, stop_after=after, **arguments)


def lines(place: Path) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in (place / "episodes.jsonl").read_bytes().splitlines()]


def without_times(episodes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Episodes without what depends on the machine."""
    for episode in episodes:
        for turn in episode["turns"]:
            turn["seconds"] = None
            if turn["generation"] is not None:
                turn["generation"]["seconds"] = None
    return episodes


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"model:{write_chat(tmp_path_factory.mktemp('model'), seed=5)}"


def test_an_evaluation_of_a_local_model_can_be_resumed(tmp_path: Path, model: str) -> None:
    # One episode at a time: then no batch differs, and every number has to agree.
    how: dict[str, Any] = {"turn_tokens": 4, "max_turns": 2, "episodes": 6, "attempts": 1}
    how |= {"overrides": ["env.num_envs=1"]}
    whole, _ = evaluated(tmp_path / "whole", model, **how)
    stopped(tmp_path / "parts", model, after=3, **how)
    found, played = evaluated(tmp_path / "parts", model, **how)

    assert (found.resumed, len(played)) == (3, 3)
    assert found.metrics == whole.metrics
    assert found.usage.completion_tokens == whole.usage.completion_tokens > 0
    assert without_times(lines(tmp_path / "parts")) == without_times(lines(tmp_path / "whole"))


def test_weights_that_changed_are_noticed(tmp_path: Path) -> None:
    folder = write_chat(tmp_path / "model", seed=5)
    how: dict[str, Any] = {"turn_tokens": 2, "max_turns": 1, "overrides": ["env.num_envs=2"]}
    stopped(tmp_path / "found", f"model:{folder}", after=2, **how)
    os.utime(folder / "model.safetensors", (1, 1))
    with pytest.raises(UsageError, match=r"holds an evaluation with other arguments: weights was .*, now "):
        evaluated(tmp_path / "found", f"model:{folder}", **how)


def test_questions_that_changed_are_noticed(tmp_path: Path) -> None:
    file = tmp_path / "questions.jsonl"
    rows = [orjson.dumps({"prompt": f"What is {n} and 1?", "answer": str(n + 1)}).decode() for n in range(4)]
    how: dict[str, Any] = {"env_id": "Questions-v0", "options": {"file": str(file)}, "split": "any"}
    file.write_text("\n".join(rows))
    stopped(tmp_path / "found", "nop", after=2, **how)
    for changed in (rows[::-1], [*rows[:3], rows[3].replace('"4"', '"5"')]):
        file.write_text("\n".join(changed))
        with pytest.raises(UsageError, match=r"holds an evaluation with other arguments: tasks was .*, now "):
            evaluated(tmp_path / "found", "nop", **how)
    file.write_text("\n".join(rows))
    assert evaluated(tmp_path / "found", "nop", **how)[0].resumed >= 2


def test_a_last_line_that_was_cut_short_is_played_again(tmp_path: Path) -> None:
    whole, _ = evaluated(tmp_path / "whole")
    stopped(tmp_path / "found", after=6)
    path = tmp_path / "found/episodes.jsonl"
    kept = len(lines(tmp_path / "found")) - 1
    path.write_bytes(path.read_bytes()[:-20])
    found, played = evaluated(tmp_path / "found")
    assert (found.resumed, len(played), found.metrics) == (kept, 24 - kept, whole.metrics)
    assert without_times(lines(tmp_path / "found")) == without_times(lines(tmp_path / "whole"))


def test_other_arguments_are_refused_with_the_difference_and_nothing_is_lost(tmp_path: Path) -> None:
    stopped(tmp_path / "found", after=6)
    before = (tmp_path / "found/episodes.jsonl").read_bytes()
    with pytest.raises(UsageError) as refused:
        evaluated(tmp_path / "found", "expert", seed=4)
    assert str(refused.value) == (
        f'{tmp_path / "found"}: holds an evaluation with other arguments: policy was "random", now "expert"; '
        "evaluation.seed was 3, now 4; repeat its command to continue it, replace it with --force or choose another "
        "folder"
    )
    assert (tmp_path / "found/episodes.jsonl").read_bytes() == before


def test_an_unfinished_evaluation_of_another_version_is_not_continued(tmp_path: Path) -> None:
    (tmp_path / "arguments.json").write_text('{"env_id": "FrozenLake-v0", "policy": "random"}')
    with pytest.raises(UsageError, match="an unfinished evaluation of another version of envkit; finish it with that"):
        evaluated(tmp_path)


class Flaky(gymnasium.Env[str, str]):
    """Breaks in its first step as long as a file is there."""

    observation_space = action_space = Utf8Text(10)
    broken: Path

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        self.is_odd = bool((seed or 0) % 2)
        return "go", {"legal_moves": ["on"]}

    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        if self.is_odd and self.broken.exists():
            raise RuntimeError("it broke")
        return "gone", 1.0, True, False, {}


@pytest.fixture
def flaky(tmp_path: Path) -> str:
    Flaky.broken = tmp_path / "broken"
    Flaky.broken.touch()
    if all(one.id != "FlakyEval-v0" for one in envkit.registered()):
        envkit.register("FlakyEval-v0", Flaky)
    return "FlakyEval-v0"


def test_the_same_command_plays_lost_episodes_again_and_no_others(tmp_path: Path, flaky: str) -> None:
    first, played = evaluated(tmp_path / "found", env_id=flaky, attempts=1)
    assert (first.episodes + first.void, len(played)) == (12, 12)
    assert 0 < first.void < 12
    Flaky.broken.unlink()
    second, again = evaluated(tmp_path / "found", env_id=flaky, attempts=1)
    assert (second.episodes, second.void, second.resumed) == (12, 0, first.episodes)
    assert len(again) == first.void
    assert [(one["index"], one["outcome"]["error"]) for one in lines(tmp_path / "found")] == [
        (task, None) for task in range(12)
    ]
