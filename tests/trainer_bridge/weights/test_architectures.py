"""Files of weights have the names and shapes of the architecture's checkpoints, and are read back exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3MoeConfig,
)
from transformers.core_model_loading import Chunk, WeightConverter

from envkit import clock
from envkit.errors import UsageError
from envkit.trainer_bridge.engines.transformers import TransformersEngine
from envkit.trainer_bridge.weights import files, lora
from envkit.trainer_bridge.weights.lora import LoraSettings
from envkit.types import Completion, SamplingParams, Weights
from tests.trainer_bridge.models import open_model, sample, shake
from tests.trainer_bridge.trainees import Trainee, completion_logps, draw_samples

Auto: Any = AutoModelForCausalLM
SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
}
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 8, "head_dim": 8}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "qwen2, tied": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3 moe": Qwen3MoeConfig(**SIZES, **EXPERTS, num_experts=4, num_experts_per_tok=2),
    "qwen3 moe, one expert": Qwen3MoeConfig(**SIZES, **EXPERTS, num_experts=1, num_experts_per_tok=1),
    "mixtral, tied": MixtralConfig(**SIZES, num_local_experts=3, tie_word_embeddings=True),
}


@pytest.fixture(params=CONFIGS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    model = Auto.from_config(CONFIGS[request.param])
    shake(model, 1)
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def shapes(path: Path) -> dict[str, tuple[int, ...]]:
    with safe_open(path, framework="pt") as opened:
        return {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118


def loaded(folder: Path, weights: Weights) -> Any:
    """The model of an engine that has loaded the weights over others."""
    playing = open_model(folder)
    shake(playing, 2)
    clock.run(lambda: TransformersEngine(playing, pad_id=0).load(weights))
    return playing


def are_equal(one: Any, other: Any) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(*pair) for pair in pairs)


def test_published_weights_have_the_tensors_of_the_checkpoint_and_are_loaded_exactly(
    folder: Path, tmp_path: Path
) -> None:
    trainee = Trainee(folder, tmp_path / "weights", preset="grpo")
    trainee.update(draw_samples(1, 8, folder))
    published = trainee.publish()
    assert Path(published.location).stat().st_mode & 0o777 == (tmp_path / "weights").stat().st_mode & 0o666
    assert shapes(Path(published.location)) == shapes(folder / "model.safetensors")
    assert are_equal(loaded(folder, published), trainee.model)
    trainee.model.save_pretrained(tmp_path / "saved")
    read = Auto.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    files.load_weights(read, Path(published.location))
    assert are_equal(read, trainee.model)


@pytest.mark.parametrize("kind", ["qwen3 moe", "mixtral, tied"])
def test_a_mixture_of_experts_resumes_bit_for_bit_and_is_sampled_from(kind: str, tmp_path: Path) -> None:
    model = Auto.from_config(CONFIGS[kind])
    shake(model, 1)
    model.save_pretrained(tmp_path / "model")
    batches = [draw_samples(seed, 8, tmp_path / "model") for seed in range(2)]
    unbroken, resumed = (Trainee(tmp_path / "model", tmp_path / "weights", preset="grpo") for _ in range(2))
    unbroken.update(batches[0])
    (tmp_path / "checkpoint").mkdir()
    unbroken.save(tmp_path / "checkpoint")
    shake(resumed.model, 2)
    resumed.restore(tmp_path / "checkpoint")
    assert resumed.update(batches[1]) == unbroken.update(batches[1])
    assert are_equal(resumed.model, unbroken.model)

    playing = open_model(tmp_path / "model")
    engine = TransformersEngine(playing, pad_id=0)

    async def main() -> Completion:
        await engine.load(await resumed.trainer.publish())
        return await engine.generate([1, 5, 9], SamplingParams(max_tokens=6, seed=1))

    got = clock.run(main)
    assert got.versions == ((2, 6),)
    played = sample([1, 5, 9], (got.token_ids.tolist(), ()))
    assert got.logprobs == pytest.approx(completion_logps(resumed.model, played), abs=1e-4)


def test_an_adapter_of_a_mixture_of_experts_names_what_is_frozen(tmp_path: Path) -> None:
    model = Auto.from_config(CONFIGS["qwen3 moe"])
    shake(model, 1)
    model.save_pretrained(tmp_path / "model")
    trainee = Trainee(
        tmp_path / "model", tmp_path / "weights", preset="grpo", adapter=LoraSettings(2, 4.0), learning_rate=0.1
    )
    line = lora.description(trainee.model)
    assert line.endswith("; the fused experts (down_proj, gate_up_proj) have no adapter and stay frozen")
    trainee.update(draw_samples(1, 8, tmp_path / "model"))
    published = trainee.publish()
    assert shapes(Path(published.location)) == shapes(tmp_path / "model" / "model.safetensors")
    playing = loaded(tmp_path / "model", published)
    for name, weight in files.named_weights(trainee.model):
        assert torch.equal(playing.get_parameter(name), weight), name


def test_a_file_that_would_join_weights_is_refused(tmp_path: Path) -> None:
    model = Auto.from_config(CONFIGS["llama"])
    parts = ["mlp.gate_proj.weight", "mlp.up_proj.weight"]
    model._weight_conversions = [WeightConverter("mlp.joined.weight", parts, operations=[Chunk(dim=0)])]
    with pytest.raises(UsageError, match="LlamaForCausalLM: its files join or change weights"):
        files.save_weights(model, tmp_path / "weights.safetensors", torch.float32)
