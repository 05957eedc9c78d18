"""Defaults follow the policy, also where a tiny one is named by the folder that envkit saved."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from envkit import clock, config
from envkit.config import RunConfig, evaluation
from envkit.config.parts import AutoRendererSection, TransformersEngineSection
from envkit.errors import ConfigError
from envkit.runs.display import SilentDisplay
from envkit.trainer_bridge.models.saved_policy import POLICY_FILE, SavedPolicy
from envkit.types import JSON
from envkit.wiring.evaluation.local_models import find_local
from envkit.wiring.training import checks
from envkit.wiring.training.policy import open_policy, playing_threads
from envkit.wiring.training.resolve import policy_kind, resolve
from envkit.wiring.training.run import train
from tests.trainer_bridge.models import fast_format, write_chat, write_tiny


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


def test_a_folder_below_home_is_recognised_too(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tiny.parent))
    assert policy_kind(run_of("~/policy")) == "tiny"


def test_a_tiny_policy_keeps_the_options_that_it_was_trained_with(tiny: Path) -> None:
    SavedPolicy(True, "FrozenLake-v0", {"instructions": False, "size": 5}).write(tiny)
    assert resolve(run_of(tiny)).envs[0].options == {"instructions": False, "size": 5}
    other = resolve(run_of(tiny, env={"id": "FrozenLake-v0", "options": {"size": 3}}))
    assert other.envs[0].options == {"instructions": False, "size": 3}
    elsewhere = resolve(run_of(tiny, env={"id": "Sokoban-v0"}))
    assert "size" not in elsewhere.envs[0].options


def test_any_other_model_gets_the_defaults_of_a_pretrained_one(tmp_path: Path, chat_folder: Path) -> None:
    for model in (chat_folder, "Qwen/Qwen2.5-0.5B-Instruct", "smollm2-135m"):
        run = resolve(run_of(model))
        assert policy_kind(run) == "pretrained"
        assert run.envs[0].options == {}
        assert (run.rollout.turn_tokens, run.imitation.kind, dtype_of(run)) == (128, "none", fast_format())


@pytest.fixture
def chat_folder(tmp_path: Path) -> Path:
    return write_chat(tmp_path / "chat", seed=2)


def test_a_saved_tiny_policy_can_train_without_imitation(tiny: Path) -> None:
    assert checks.check(run_of(tiny, imitation={"kind": "none"})) == []


def test_a_tiny_policy_named_by_its_folder_has_no_chat_template(tiny: Path) -> None:
    assert checks.check(run_of(tiny, renderer={"system": "Be brief."})) == [
        "renderer.system: needs a chat template, which a tiny policy does not have"
    ]


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


def test_the_policy_line_says_which_kind_it_is(tiny: Path, chat_folder: Path) -> None:
    async def line(model: Path | None) -> str:
        async with open_policy(resolve(run_of(model)), folder=tiny.parent / "weights", threads=1) as policy:
            return policy.description

    assert clock.run(line, tiny).startswith("tiny policy, LlamaForCausalLM with ")
    assert clock.run(line, chat_folder).startswith("pretrained Qwen2ForCausalLM with ")
    assert clock.run(line, None).startswith("tiny policy, LlamaForCausalLM with ")


@pytest.mark.parametrize(("rate", "count"), [(1e-4, 0), (2e-4, 1)])
def test_a_learning_rate_that_can_destroy_a_pretrained_model_gets_a_line(
    tiny: Path, chat_folder: Path, rate: float, count: int
) -> None:
    line = "trainer.learning_rate: 0.0002 is above 0.0001, which can destroy a pretrained model; about 1e-6 is usual"
    section = {"learning_rate": rate}
    assert checks.unverified(run_of(chat_folder, trainer=section)) == [line][:count]
    assert checks.unverified(run_of(tiny, trainer=section)) == []
    assert checks.unverified(run_of(None, trainer=section)) == []


def test_an_evaluation_of_the_folder_plays_as_the_policy_was_trained(tiny: Path) -> None:
    described = evaluation.parse({"env": {"id": "FrozenLake-v0"}, "policy": f"model:{tiny}"})
    found = find_local(described, "model", str(tiny))
    assert (found.options, found.limits.turn_tokens, found.warning) == ({"instructions": False}, 1, "")


@pytest.mark.slow
def test_every_checkpoint_says_what_its_policy_is(tmp_path: Path) -> None:
    run = config.parse(
        {
            "env": {"id": "FrozenLake-v0", "num_envs": 8, "options": {"size": 3}},
            "sandbox": {"kind": "none"},
            "engine": {"hidden_size": 16, "layers": 1},
            "rollout": {"group_size": 2, "max_turns": 4, "max_tokens": 256},
            "trainer": {"steps": 1, "groups_per_step": 4},
            "threads": 1,
            "evaluation": {"episodes": 4},
            "imitation": {"states": 20, "updates": 1, "batch": 4, "check_episodes": 0},
        }
    )
    folder = tmp_path / "run"
    clock.run(partial(train, run, folder, resume=False, force=False, display=SilentDisplay()))
    renderer: dict[str, JSON] = {"kind": "auto", "system": None, "template": {}, "thinking": "keep", "history": "all"}
    saved = SavedPolicy(True, "FrozenLake-v0", {"instructions": False, "size": 3}, 1, renderer)
    for step in (0, 1):
        policy = folder / "checkpoints" / f"step-{step}" / "policy"
        assert SavedPolicy.read(policy) == saved
        assert resolve(run_of(policy)).envs[0].options == saved.options
    summary = json.loads((folder / "summary.json").read_bytes())
    assert summary["policy"].startswith("tiny policy, LlamaForCausalLM with ")
