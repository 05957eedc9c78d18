"""LoRA and packing in training files: problems, defaults, runs, and the folders that runs write."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from envkit import clock, config
from envkit.config import RunConfig, evaluation
from envkit.config.parts import TorchTrainerSection
from envkit.errors import UsageError
from envkit.runs.display import SilentDisplay
from envkit.trainer_bridge.run_folder import plots
from envkit.types import SamplingParams
from envkit.wiring.evaluation.local_models import find_local
from envkit.wiring.training import checks
from envkit.wiring.training.resolve import resolve
from envkit.wiring.training.run import train
from tests.trainer_bridge.models import fast_format, write_chat, write_tiny
from tests.trainer_bridge.policies import load_policy

ADAPTER = "adapter_model.safetensors"


@pytest.fixture
def chat_folder(tmp_path: Path) -> Path:
    return write_chat(tmp_path / "base", seed=2)


def run_of(model: Path | None, *, lora: Any = None, **sections: Any) -> RunConfig:
    trainer = {"lora": {} if lora is None else lora, **sections.pop("trainer", {})}
    content = {"env": {"id": "FrozenLake-v0"}, "trainer": trainer, "engine": {"model": model and str(model)}}
    return config.parse({**content, **sections})


def trainer_of(run: RunConfig) -> TorchTrainerSection:
    assert isinstance(run.trainer, TorchTrainerSection)
    return run.trainer


# --- Training files --------------------------------------------------------------------------------------------------


def test_a_tiny_policy_has_no_lora(tmp_path: Path) -> None:
    saved = write_tiny(tmp_path, seed=1)
    problem = "trainer.lora: a tiny policy is trained as a whole; use null, or name a model in engine.model"
    assert checks.check(run_of(None)) == [problem]
    assert checks.check(run_of(saved)) == []  # a folder that envkit did not save


@pytest.mark.parametrize(
    ("layers", "keys", "rank"),
    [(28, {}, 16), (20, {}, None), (28, {"lora": None}, None), (28, {"lora": {"rank": 4}}, 4)],
)
def test_a_model_of_seven_billion_parameters_has_an_adapter_unless_the_file_says_otherwise(
    layers: int, keys: Any, rank: int | None, tmp_path: Path
) -> None:
    shape = {"hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4}
    shape |= {"num_hidden_layers": layers, "vocab_size": 152064, "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    run = config.parse({"env": {"id": "FrozenLake-v0"}, "trainer": keys, "engine": {"model": str(tmp_path)}})
    trainer = trainer_of(resolve(run))
    assert (trainer.lora and trainer.lora.rank) == rank
    assert trainer.learning_rate == (1e-6 if rank is None else 2e-5)


def test_the_rates_follow_the_adapter(chat_folder: Path) -> None:
    def found(**sections: Any) -> tuple[object, ...]:
        run = resolve(run_of(chat_folder, **sections))
        trainer = trainer_of(run)
        assert trainer.lora is not None
        return trainer.learning_rate, trainer.critic_learning_rate, run.imitation.learning_rate, trainer.precision

    assert found() == (2e-5, 1e-4, 2e-4, fast_format())
    assert found(trainer={"learning_rate": 3e-4})[0] == 3e-4


# --- Runs ------------------------------------------------------------------------------------------------------------


def content(model: Path, *, steps: int) -> dict[str, Any]:
    return {
        "env": {"id": "FrozenLake-v0", "num_envs": 4, "options": {"size": 3, "instructions": False}},
        "sandbox": {"kind": "none"},
        "engine": {"model": str(model), "dtype": "float32"},
        "rollout": {"group_size": 2, "max_turns": 2, "max_tokens": 256, "turn_tokens": 3},
        "algorithm": {"preset": "grpo", "entropy_coefficient": 0.1, "kl": {"coefficient": 0.1}},
        "threads": 1,
        "trainer": {
            "steps": steps,
            "groups_per_step": 4,
            "precision": "float32",
            "packing": True,
            "learning_rate": 1e-2,
            "checkpoint_every": 1,
            "lora": {"rank": 2},
        },
        "evaluation": {"episodes": 0},
        "tracking": {"to": []},
    }


def trained(model: Path, folder: Path, *, steps: int, resume: bool = False) -> Path:
    run = config.parse(content(model, steps=steps))
    clock.run(partial(train, run, folder, resume=resume, force=False, display=SilentDisplay()))
    return folder / "checkpoints" / f"step-{steps}" / "policy"


def answers(path: Path) -> list[float]:
    policy = load_policy(str(path))

    async def main() -> list[float]:
        made = await policy.engine.generate([40, 41, 42], SamplingParams(max_tokens=20, seed=5))
        return [*made.token_ids.tolist(), *made.logprobs.tolist()]

    return clock.run(main, virtual=True)


@pytest.mark.slow
def test_the_policy_of_a_run_is_evaluated_and_trained_on_as_long_as_its_model_exists(
    chat_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plots, "draw", lambda *_: None)  # takes longer than the run
    policy = trained(chat_folder, tmp_path / "run", steps=1)
    assert json.loads((policy / "adapter_config.json").read_text())["base_model_name_or_path"] == str(chat_folder)
    assert not (policy / "model.safetensors").exists()
    both = (("model", policy), ("checkpoint", tmp_path / "run"))
    lake = {"env": {"id": "FrozenLake-v0"}}
    described = [(evaluation.parse({**lake, "policy": f"{kind}:{one}"}), kind, str(one)) for kind, one in both]
    named, checkpoint = (find_local(*one) for one in described)
    assert named.identity == checkpoint.identity
    assert named.identity.startswith(f"{policy} ")
    assert checks.check(config.parse(content(policy, steps=1))) == []
    assert answers(policy) != answers(chat_folder)
    # Without training, an adapter on top of the adapter plays like it.
    again = trained(policy, tmp_path / "again", steps=0).parent.parent / "step-0" / "policy"
    assert answers(again) == answers(policy)

    shutil.move(chat_folder, tmp_path / "elsewhere")
    gone = f"{policy}: the model of this adapter is not at {chat_folder}; move it there, or change "
    assert checks.check(config.parse(content(policy, steps=1)))[0].startswith(f"engine.model: {gone}")
    with pytest.raises(UsageError) as caught:
        load_policy(str(policy))
    assert str(caught.value).startswith(gone)


def test_an_adapter_of_another_model_is_refused_in_one_line(tmp_path: Path, chat_folder: Path) -> None:
    policy = tmp_path / "policy"
    shutil.copytree(chat_folder, policy)
    (policy / "config.json").unlink()
    made: dict[str, Any] = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    text = json.dumps({**made, "base_model_name_or_path": str(chat_folder)})
    (policy / "adapter_config.json").write_text(text)
    (policy / "model.safetensors").rename(policy / ADAPTER)
    assert len(load_file(policy / ADAPTER)) > 1
    with pytest.raises(UsageError, match=r"^cannot load .*: the adapter does not fit its model: .* is unknown"):
        load_policy(str(policy))


@pytest.mark.parametrize(
    ("text", "problem"),
    [("{", "cannot be read: "), ("{}", "base_model_name_or_path is missing; set it to the folder or hub name")],
)
def test_a_damaged_file_of_an_adapter_is_one_problem(text: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(text)
    (found,) = checks.check(run_of(tmp_path))
    assert found.startswith(f"engine.model: {tmp_path / 'adapter_config.json'}: {problem}")
