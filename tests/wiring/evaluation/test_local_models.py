"""Language models that are evaluated in this process: what is loaded, and how it plays."""

from __future__ import annotations

from pathlib import Path

import pytest

from envkit import config
from envkit.config import RunConfig
from envkit.config.parts import AutoRendererSection, TransformersEngineSection
from envkit.errors import UsageError
from envkit.trainer_bridge.models.saved_policy import SavedPolicy
from envkit.wiring.evaluation.local_models import LocalModel
from envkit.wiring.evaluation.players import Playing
from envkit.wiring.training.resolve import is_tiny, resolve
from tests.trainer_bridge.models import fast_format, write_chat, write_tiny


def found(name: str | Path, **playing: object) -> LocalModel:
    return LocalModel.of_name(str(name), "FrozenLake-v0", Playing(**playing), seed=0)  # type: ignore[arg-type]


def dtype_of(run: RunConfig) -> str:
    assert isinstance(run.engine, TransformersEngineSection)
    return run.engine.dtype


def renderer_of(run: RunConfig) -> AutoRendererSection:
    assert isinstance(run.renderer, AutoRendererSection)
    return run.renderer


def test_a_pretrained_model_plays_in_the_fast_format_with_instructions_and_128_tokens_a_turn(tmp_path: Path) -> None:
    model = found(write_chat(tmp_path, seed=1))
    assert (dtype_of(model.run), model.limits.turn_tokens) == (fast_format(), 128)
    assert model.options_for("FrozenLake-v0") == {}
    assert renderer_of(model.run).system is None


def test_a_tiny_policy_that_envkit_saved_plays_as_it_was_trained(tmp_path: Path) -> None:
    SavedPolicy(True, "FrozenLake-v0", {"size": 3, "instructions": False}).write(write_tiny(tmp_path, seed=1))
    model = found(tmp_path)
    assert (dtype_of(model.run), model.limits.turn_tokens) == ("float32", 1)
    assert model.options_for("FrozenLake-v0") == {"size": 3, "instructions": False}
    assert model.options_for("Sokoban-v0") == {}


def test_what_the_caller_sets_is_what_plays(tmp_path: Path) -> None:
    how = {"system": "Be brief.", "thinking": "cut", "history": 1, "turn_tokens": 5, "max_turns": 3, "batch": 2}
    model = found(write_chat(tmp_path, seed=1), **how)
    run = model.run
    renderer = renderer_of(run)
    assert (renderer.system, renderer.thinking, renderer.history) == ("Be brief.", "cut", 1)
    assert (run.rollout.turn_tokens, run.rollout.max_turns, model.batch) == (5, 3, 2)


def test_a_model_that_is_not_there_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^no model at .*/nowhere; name a folder"):
        found(tmp_path / "nowhere")


def test_other_weights_under_the_same_name_have_another_identity(tmp_path: Path) -> None:
    before = found(write_chat(tmp_path, seed=1)).identity
    assert before == found(tmp_path).identity
    assert before != found(write_chat(tmp_path, seed=2)).identity


def test_what_a_checkpoint_draws_follows_from_the_seed_of_the_evaluation_and_not_of_its_run(tmp_path: Path) -> None:
    place = tmp_path / "checkpoints" / "step-1"
    write_chat(place / "policy", seed=1)
    run = config.parse({"env": {"id": "FrozenLake-v0"}, "evaluation": {"seed": 5}})
    (tmp_path / "config.yaml").write_text(config.dump(resolve(run)))
    assert LocalModel.of_checkpoint(tmp_path, Playing(), seed=8).run.evaluation.seed == 8


def test_a_policy_named_by_its_folder_says_that_it_was_trained_on_another_environment(tmp_path: Path) -> None:
    SavedPolicy(True, "Sokoban-v0", {}).write(write_tiny(tmp_path, seed=1))
    line = found(tmp_path).mismatch("FrozenLake-v0")
    assert line.startswith(
        "warning: the policy was trained on Sokoban-v0 and plays FrozenLake-v0 within these limits: "
    )
    assert found(tmp_path).mismatch("Sokoban-v0") == ""


def test_a_checkpoint_is_still_tiny_when_the_folder_that_it_began_as_is_gone(tmp_path: Path) -> None:
    policy = write_tiny(tmp_path / "checkpoints" / "step-1" / "policy", seed=1)
    SavedPolicy(True, "FrozenLake-v0", {}).write(policy)
    gone = config.parse({"env": {"id": "FrozenLake-v0"}, "engine": {"model": "./gone"}})
    (tmp_path / "config.yaml").write_text(config.dump(resolve(gone)))
    assert is_tiny(LocalModel.of_checkpoint(tmp_path, Playing(), seed=0).run)


def test_a_run_with_vllm_plays_its_checkpoint_and_not_what_a_server_has(tmp_path: Path) -> None:
    write_chat(tmp_path / "checkpoints/step-1/policy", seed=1)
    engine = {"kind": "vllm", "model": "a/b", "url": "http://127.0.0.1:9"}
    (tmp_path / "config.yaml").write_text(config.dump(config.parse({"env": {"id": "FrozenLake-v0"}, "engine": engine})))
    found = LocalModel.of_checkpoint(tmp_path, Playing(), seed=0).run.engine
    assert (found.kind, found.model) == ("transformers", str(tmp_path / "checkpoints/step-1/policy"))
