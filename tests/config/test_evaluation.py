"""Evaluation files: three spellings of one description."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from envkit.config import EvalConfig, evaluation
from envkit.errors import ConfigError, UsageError

CONTENT = {
    "env": {"id": "FrozenLake-v0", "options": {"size": 4}},
    "policy": "openai:m@http://h",
    "evaluation": {"episodes": 8, "attempts": 2, "split": "any"},
    "rollout": {"temperature": 0.5, "max_turns": 3},
    "renderer": {"history": 2},
}


def test_a_file_options_and_python_arguments_describe_the_same_evaluation(tmp_path: Path) -> None:
    file = tmp_path / "lake.yaml"
    file.write_text(str(CONTENT))
    overrides = ["rollout.temperature=0.5", "renderer.history=2", "env.options={size: 4}"]
    settings: dict[str, Any] = {
        "policy": "openai:m@http://h",
        "episodes": 8,
        "attempts": 2,
        "split": "any",
        "max_turns": 3,
    }
    found = [
        evaluation.read(file),
        evaluation.read(CONTENT),
        evaluation.read(evaluation.parse(CONTENT)),
        evaluation.read("FrozenLake-v0", overrides, **settings),
        evaluation.read("FrozenLake-v0", overrides[1:2], options={"size": 4}, temperature=0.5, **settings),
    ]
    assert found == [EvalConfig.model_validate(CONTENT)] * 5
    assert found[0].set_keys("rollout") == {"temperature": 0.5, "max_turns": 3}


def test_later_settings_go_before_those_of_the_file() -> None:
    found = evaluation.read(CONTENT, ["evaluation.attempts=4"], episodes=9)
    assert (found.evaluation.episodes, found.evaluation.attempts, found.evaluation.split) == (9, 4, "any")


@pytest.mark.parametrize("sampling", [{"temperature": 0.5}, {"overrides": ["rollout.temperature=0.5"]}])
def test_greedy_play_refuses_a_temperature(sampling: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="greedy play does not sample; leave out greedy or temperature"):
        evaluation.read(CONTENT, greedy=True, **sampling)
    assert evaluation.read(CONTENT, greedy=True).rollout.temperature == 0


def test_what_is_unknown_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UsageError, match="there is no setting 'episode'; did you mean 'episodes'"):
        evaluation.read(CONTENT, episode=3)
    with pytest.raises(ConfigError, match=r"rollout.max_turn: no such key; did you mean 'max_turns'"):
        evaluation.read(CONTENT, ["rollout.max_turn=3"])
    with pytest.raises(UsageError, match=r"there is no setting 'num_envs'; .*; for other keys, use overrides"):
        evaluation.read(CONTENT, num_envs=3)
    with pytest.raises(ConfigError, match="env: is a list, but an evaluation plays one environment; write one file"):
        evaluation.read({**CONTENT, "env": [CONTENT["env"]]})
    with pytest.raises(ConfigError, match="policy: missing; name one"):
        evaluation.read("FrozenLake-v0")
