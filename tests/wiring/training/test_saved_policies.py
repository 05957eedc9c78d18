"""Defaults follow the policy, also where a tiny one is named by the folder that envkit saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from envkit import config
from envkit.config import RunConfig
from envkit.config.parts import AutoRendererSection, TransformersEngineSection
from envkit.errors import ConfigError
from envkit.trainer_bridge.models.saved_policy import POLICY_FILE, SavedPolicy
from envkit.types import JSON
from envkit.wiring.training import checks
from envkit.wiring.training.policy import playing_threads
from envkit.wiring.training.resolve import resolve
from tests.trainer_bridge.models import write_chat, write_tiny


def run_of(model: Path | str | None, **sections: Any) -> RunConfig:
    return config.parse({"env": {"id": "FrozenLake-v0"}, **sections, "engine": {"model": model and str(model)}})


def dtype_of(run: RunConfig) -> str:
    assert isinstance(run.engine, TransformersEngineSection)
    return run.engine.dtype


def without_model(run: RunConfig) -> dict[str, Any]:
    content = run.model_dump()
    del content["engine"]["model"]
    return content


def test_a_pretrained_policy_named_by_its_folder_plays_as_it_was_trained(tmp_path: Path) -> None:
    folder = write_chat(tmp_path / "policy", seed=2)
    trained: dict[str, JSON] = {"system": "Walk to G.", "template": {}, "thinking": "cut", "history": 1}
    SavedPolicy(False, "FrozenLake-v0", {"size": 5}, 4, trained).write(folder)
    run = resolve(run_of(folder))
    assert (run.envs[0].options, run.rollout.turn_tokens) == ({"size": 5}, 4)
    assert run.renderer.model_dump() == {"kind": "auto", **trained}


def test_the_file_goes_before_what_a_policy_was_trained_with(tmp_path: Path) -> None:
    folder = write_chat(tmp_path / "policy", seed=2)
    SavedPolicy(False, "FrozenLake-v0", {"size": 5}, 4, {"system": "Walk to G.", "history": 1}).write(folder)
    run = resolve(run_of(folder, rollout={"turn_tokens": 9}, renderer={"history": "all"}))
    assert isinstance(run.renderer, AutoRendererSection)
    assert (run.rollout.turn_tokens, run.renderer.history, run.renderer.system) == (9, "all", "Walk to G.")


def test_on_another_environment_a_saved_policy_keeps_nothing_of_its_own(tmp_path: Path) -> None:
    folder = write_chat(tmp_path / "policy", seed=2)
    SavedPolicy(False, "FrozenLake-v0", {"size": 5}, 4, {"history": 1}).write(folder)
    run = resolve(run_of(folder, env={"id": "Sokoban-v0"}))
    assert ("size" in run.envs[0].options, run.rollout.turn_tokens, run.renderer.history) == (False, 128, "all")


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A tiny policy, saved after a run on FrozenLake-v0."""
    folder = write_tiny(tmp_path / "policy", seed=1)
    SavedPolicy(True, "FrozenLake-v0", {"instructions": False}).write(folder)
    return folder


def test_a_tiny_policy_named_by_its_folder_gets_the_defaults_of_one_made_on_the_spot(tiny: Path) -> None:
    made, named = resolve(run_of(None)), resolve(run_of(tiny))
    assert without_model(named) == without_model(made)
    assert named.envs[0].options == {"instructions": False}
    assert (named.rollout.turn_tokens, named.imitation.kind, dtype_of(named)) == (1, "demonstrations", "float32")
    assert playing_threads(named) == playing_threads(made) == 1


@pytest.fixture
def chat_folder(tmp_path: Path) -> Path:
    return write_chat(tmp_path / "chat", seed=2)


def test_a_saved_tiny_policy_can_train_without_imitation(tiny: Path) -> None:
    assert checks.check(run_of(tiny, imitation={"kind": "none"})) == []


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({"format": 2}, "has format 2, but this version of envkit reads format 1"),
        ({"format": 1, "tiny": True}, "is damaged: KeyError('env_id')"),
        ([], "has format None, but this version of envkit reads format 1"),
    ],
)
def test_a_policy_folder_of_another_format_is_one_problem(tiny: Path, content: Any, problem: str) -> None:
    (tiny / POLICY_FILE).write_text(json.dumps(content))
    assert checks.check(run_of(tiny)) == [f"engine.model: {tiny / POLICY_FILE}: {problem}"]
    with pytest.raises(ConfigError):
        resolve(run_of(tiny))


@pytest.mark.parametrize(("rate", "count"), [(1e-4, 0), (2e-4, 1)])
def test_a_learning_rate_that_can_destroy_a_pretrained_model_gets_a_line(
    tiny: Path, chat_folder: Path, rate: float, count: int
) -> None:
    line = "trainer.learning_rate: 0.0002 is above 0.0001, which can destroy a pretrained model; about 1e-6 is usual"
    section = {"learning_rate": rate}
    assert checks.unverified(run_of(chat_folder, trainer=section)) == [line][:count]
    assert checks.unverified(run_of(tiny, trainer=section)) == []
    assert checks.unverified(run_of(None, trainer=section)) == []
