"""Language models that are evaluated in this process: what is found, and how it plays."""

from __future__ import annotations

from pathlib import Path

import pytest

from envkit import config
from envkit.config import evaluation
from envkit.config.parts import AgentSection
from envkit.errors import UsageError
from envkit.trainer_bridge.models.saved_policy import SavedPolicy
from envkit.wiring.evaluation import local_models
from envkit.wiring.evaluation.contestant import FoundPolicy
from envkit.wiring.evaluation.policies import find_policy
from envkit.wiring.training.agents import views_of
from envkit.wiring.training.resolve import policy_kind, resolve
from tests.trainer_bridge.models import write_chat, write_tiny


def found(name: str | Path, env_id: str = "FrozenLake-v0") -> FoundPolicy:
    return find_policy(evaluation.read(env_id, policy=f"model:{name}"), None)


def test_a_pretrained_model_plays_with_instructions_and_128_tokens_a_turn(tmp_path: Path) -> None:
    model = found(write_chat(tmp_path, seed=1))
    assert (model.limits.turn_tokens, model.options, model.at_once, model.temperature) == (128, {}, 16, 1.0)


def test_a_tiny_policy_that_envkit_saved_plays_as_it_was_trained(tmp_path: Path) -> None:
    SavedPolicy(True, "FrozenLake-v0", {"size": 3, "instructions": False}).write(write_tiny(tmp_path, seed=1))
    model = found(tmp_path)
    assert (model.limits.turn_tokens, model.options, model.warning) == (1, {"size": 3, "instructions": False}, "")
    elsewhere = found(tmp_path, env_id="Sokoban-v0").warning
    assert elsewhere.startswith(
        "warning: the policy was trained on FrozenLake-v0 and plays Sokoban-v0 with rollout.max_"
    )


def test_what_the_caller_sets_is_what_plays(tmp_path: Path) -> None:
    described = evaluation.read(
        "FrozenLake-v0",
        ["renderer.thinking=cut", "renderer.history=1", "env.num_envs=2"],
        policy=f"model:{write_chat(tmp_path, seed=1)}",
        system="Be brief.",
        turn_tokens=5,
        max_turns=3,
    )
    run = local_models._run({"env": {"id": "FrozenLake-v0"}, "engine": {"model": str(tmp_path)}}, described)
    assert run.renderer.model_dump(exclude_unset=True) == {"system": "Be brief.", "thinking": "cut", "history": 1}
    model = find_policy(described, None)
    assert (model.limits.turn_tokens, model.limits.max_turns, model.at_once) == (5, 3, 2)


def test_a_model_that_is_not_there_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^no model at .*/nowhere; name a folder"):
        found(tmp_path / "nowhere")


def test_other_weights_under_the_same_name_have_another_identity(tmp_path: Path) -> None:
    before = found(write_chat(tmp_path, seed=1)).identity
    assert before == found(tmp_path).identity
    assert before != found(write_chat(tmp_path, seed=2)).identity


def test_a_checkpoint_is_still_tiny_when_the_folder_that_it_began_as_is_gone(tmp_path: Path) -> None:
    policy = write_tiny(tmp_path / "checkpoints" / "step-1" / "policy", seed=1)
    SavedPolicy(True, "FrozenLake-v0", {}).write(policy)
    gone = config.parse({"env": {"id": "FrozenLake-v0"}, "engine": {"model": "./gone"}})
    (tmp_path / "config.yaml").write_text(config.dump(resolve(gone)))
    _, content = local_models._checkpoint(tmp_path)
    assert policy_kind(config.parse(content)) == "tiny"


def test_a_checkpoint_plays_with_the_agent_of_its_run_unless_the_evaluation_has_another(tmp_path: Path) -> None:
    write_chat(tmp_path / "checkpoints/step-1/policy", seed=1)
    agent = {"command": ["mini"], "views": {"/opt/mini": str(tmp_path)}}
    run = {"env": {"id": "FrozenLake-v0"}, "engine": {"model": "./gone"}, "agent": agent}
    (tmp_path / "config.yaml").write_text(config.dump(config.parse(run)))

    def found_agent(*overrides: str) -> AgentSection:
        described = evaluation.read("FrozenLake-v0", overrides, policy=f"checkpoint:{tmp_path}")
        agent = find_policy(described, None).agent
        assert agent is not None
        return agent

    assert (found_agent().command, views_of(found_agent())) == (["mini"], [(str(tmp_path), "/opt/mini")])
    other = found_agent("agent.function=tests.config.agents:once")
    assert (other.command, other.function) == ([], "tests.config.agents:once")


def test_a_run_with_vllm_plays_its_checkpoint_and_not_what_a_server_has(tmp_path: Path) -> None:
    write_chat(tmp_path / "checkpoints/step-1/policy", seed=1)
    engine = {"kind": "vllm", "model": "a/b", "url": "http://127.0.0.1:9"}
    (tmp_path / "config.yaml").write_text(config.dump(config.parse({"env": {"id": "FrozenLake-v0"}, "engine": engine})))
    path, content = local_models._checkpoint(tmp_path)
    assert path == str(tmp_path / "checkpoints/step-1/policy")
    assert content["engine"] == {"kind": "transformers", "model": path}
