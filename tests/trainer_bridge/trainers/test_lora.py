"""LoRA: what is trained, published and saved of a model with an adapter."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from envkit import clock
from envkit.errors import UsageError
from envkit.trainer_bridge.engines.transformers import TransformersEngine
from envkit.trainer_bridge.weights.files import checksum, copy_weights, is_of_adapter
from envkit.trainer_bridge.weights.lora import LoraSettings, merge_adapter
from tests.trainer_bridge.models import open_model
from tests.trainer_bridge.trainees import KINDS, Trainee, completion_logps, draw_samples

WITH_OTHERS = pytest.mark.parametrize(
    ("kind", "folder"), [("grpo with kl", "tied"), ("ppo", "untied")], indirect=["folder"]
)
"""Kinds with a reference and with a critic."""
BOTH = pytest.mark.parametrize("folder", ["tied", "untied"], indirect=True)
"""Whether the embeddings are the output layer, which the files and the merged weights depend on."""
ADAPTER = LoraSettings(rank=3, alpha=6.0)


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tiny_folder: Path, chat_folder: Path) -> Path:
    return tiny_folder if getattr(request, "param", "untied") == "tied" else chat_folder


def trainee(folder: Path, weights: Path | None = None, *, kind: str = "grpo", **how: Any) -> Trainee:
    settings = {"adapter": ADAPTER, **KINDS[kind], **how}
    return Trainee(folder, weights, **settings)


def learn(one: Trainee, folder: Path, *seeds: int) -> Mapping[str, float]:
    return [one.update(draw_samples(seed, 8, folder)) for seed in seeds][-1]


def shake_adapter(model: Any, seed: int) -> None:
    """Give the adapter of a model weights that change its distributions a lot."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if is_of_adapter(name):
                weight.normal_(0.0, 0.3, generator=draw)


def plain_weights(model: Any) -> dict[str, Tensor]:
    named = model.named_parameters()
    return {name.replace(".base_layer.", "."): one.detach().clone() for name, one in named if not is_of_adapter(name)}


# --- Training --------------------------------------------------------------------------------------------------------


def test_a_new_adapter_changes_nothing_and_is_drawn_from_the_seed(folder: Path) -> None:
    samples = draw_samples(0, 8, folder)
    plain = Trainee(folder, None, preset="grpo")
    one, same, other = (trainee(folder, seed=seed) for seed in (3, 3, 4))
    for logps, expected in zip(one.score(samples), plain.score(samples), strict=True):
        assert logps == pytest.approx(expected, abs=1e-6)
    assert one.weights() == same.weights() != other.weights()


@BOTH
@torch.no_grad()
def test_the_gradient_of_an_adapter_follows_from_that_of_the_merged_weights(folder: Path, tmp_path: Path) -> None:
    samples = draw_samples(1, 8, folder)
    how: dict[str, Any] = {"minibatches": 1, "epochs": 1, "learning_rate": 1e-30}
    one = trainee(folder, gradient_checkpointing=True, **how)
    shake_adapter(one.model, 1)
    merged = open_model(folder)
    copy_weights(one.model, merged)
    merged.save_pretrained(tmp_path)
    plain = Trainee(tmp_path, None, preset="grpo", **how)
    layers = {name: layer for name, layer in one.model.named_modules() if hasattr(layer, "base_layer")}
    matrices = {name: (layer.lora_A.default.weight, layer.lora_B.default.weight) for name, layer in layers.items()}
    before = {name: (a.clone(), b.clone()) for name, (a, b) in matrices.items()}
    for trained in (one, plain):
        trained.update(samples)
    assert len(before) == 14
    for name, (a, b) in before.items():
        gradient = plain.model.get_parameter(f"{name}.weight").grad
        for weight, expected in zip(matrices[name], (2.0 * b.T @ gradient, 2.0 * gradient @ a.T), strict=True):
            torch.testing.assert_close(weight.grad, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))


def test_updates_of_a_millionth_are_kept_beside_a_base_of_bfloat16(folder: Path) -> None:
    one = trainee(folder, dtype=torch.bfloat16, precision="bfloat16", learning_rate=1e-6)
    formats = {is_of_adapter(name): weight.dtype for name, weight in one.model.named_parameters()}
    assert formats == {True: torch.float32, False: torch.bfloat16}
    assert (one.scorer.in_blocks, one.scorer.shares_rows) == (True, True)
    shake_adapter(one.model, 1)
    before = {name: weight.detach().clone() for name, weight in one.model.named_parameters() if is_of_adapter(name)}
    learn(one, folder, 0)
    for name, weight in before.items():
        moved = (one.model.get_parameter(name).detach() - weight).abs()
        assert float((moved > 0).float().mean()) > 0.9, name
        assert float(moved.max()) < 1e-5, name


def test_the_reference_is_the_policy_before_training_and_shares_its_frozen_weights(folder: Path) -> None:
    one = trainee(folder, kind="grpo with kl")
    samples = draw_samples(0, 8, folder)
    base = Trainee(folder, None, preset="grpo").score(samples)
    learn(one, folder, 0, 1)
    found = one.trainer._learner.score(samples, of_reference=True)[0]
    for logps, expected in zip(found, base, strict=True):
        assert logps.tolist() == pytest.approx(expected, abs=1e-6)
    assert one.score(samples)[0] != pytest.approx(base[0], abs=1e-3)
    for name, weight in one.model.named_parameters():
        shared = one.reference.get_parameter(name).data_ptr() == weight.data_ptr()
        assert shared is not is_of_adapter(name)


def test_the_critic_trains_its_own_adapter_and_shares_the_frozen_weights(folder: Path) -> None:
    one = trainee(folder, kind="ppo")
    (critic,) = one.critics
    trained = [name for name, weight in critic.named_parameters() if weight.requires_grad]
    assert set(trained) == {"head.weight", "head.bias"} | {name for name in trained if is_of_adapter(name)}
    before = {name: critic.get_parameter(name).detach().clone() for name in trained}
    learn(one, folder, 0, 1)
    assert [name for name in trained if torch.equal(before[name], critic.get_parameter(name))] == []
    weight = critic.body.layers[0].mlp.up_proj.base_layer.weight
    assert weight.data_ptr() == one.model.base_model.layers[0].mlp.up_proj.base_layer.weight.data_ptr()


def test_imitation_trains_the_adapter_and_is_the_reference_afterwards(folder: Path) -> None:
    one = trainee(folder, kind="grpo with kl", imitation_rate=1e-2)
    samples = draw_samples(0, 8, folder)
    before = plain_weights(one.model)
    start = one.score(samples)
    one.imitate([samples] * 3)
    anyio.run(one.trainer.begin, "reinforcement", 1)
    warm = one.score(samples)
    assert warm[0] != pytest.approx(start[0], abs=1e-3)
    assert all(torch.equal(before[name], weight) for name, weight in plain_weights(one.model).items())
    found = one.trainer._learner.score(samples, of_reference=True)[0]
    assert [logps.tolist() for logps in found] == warm


@pytest.mark.parametrize("target", ["lm_head", "q_pro"])
def test_a_target_that_cannot_have_an_adapter_is_refused(target: str, folder: Path) -> None:
    with pytest.raises(UsageError, match=rf"^trainer\.lora\.targets: the model has no linear layer '{target}' "):
        trainee(folder, adapter=LoraSettings(3, 6.0, ("q_proj", target)))


# --- Publishing ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "folder"), [("file", "tied"), ("memory", "untied")], indirect=["folder"])
def test_an_engine_plays_with_the_adapter_added_to_the_weights(kind: str, folder: Path, tmp_path: Path) -> None:
    one = trainee(folder, None if kind == "memory" else tmp_path / "weights")
    shake_adapter(one.model, 1)
    playing = open_model(folder)
    engine = TransformersEngine(playing, pad_id=0)
    engine.copy_from(one.trainer.copy_to)
    published = one.publish()
    clock.run(partial(engine.load, published), virtual=True)
    samples = draw_samples(0, 8, folder)
    for sample, expected in zip(samples, one.score(samples), strict=True):
        assert completion_logps(playing, sample) == pytest.approx(expected, abs=1e-5)
    assert not published.adapter
    assert published.checksum == checksum(playing, torch.float32) != checksum(open_model(folder), torch.float32)


def test_merged_weights_are_rounded_once(folder: Path) -> None:
    one = trainee(folder, dtype=torch.bfloat16)
    shake_adapter(one.model, 1)
    playing = open_model(folder).to(torch.bfloat16)
    before = playing.get_parameter("model.layers.0.mlp.up_proj.weight").detach().clone()
    copy_weights(one.model, playing)
    layer = one.model.get_submodule("model.layers.0.mlp.up_proj")
    product = layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    expected = (before.float() + 2.0 * product).to(torch.bfloat16)
    assert torch.equal(playing.get_parameter("model.layers.0.mlp.up_proj.weight"), expected)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft
def test_an_engine_that_takes_adapters_gets_the_adapter_alone_in_the_format_of_peft(
    folder: Path, tmp_path: Path
) -> None:
    one = trainee(folder, tmp_path, publishes_adapter=True)
    shake_adapter(one.model, 1)
    published = one.publish()
    assert (published.adapter, published.location) == (True, str(tmp_path / "version-0"))
    place = Path(published.location)
    assert sorted(path.name for path in place.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    tensors = load_file(place / "adapter_model.safetensors")
    assert len(tensors) == 2 * 2 * 7
    assert tensors["base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"].shape == (3, 16)
    config = json.loads((place / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (3, 6.0, str(folder))
    assert config["target_modules"] == [
        *("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")
    ]  # fmt: skip
    from peft import PeftModel  # imported late, because the import takes seconds

    read: Any = PeftModel.from_pretrained(open_model(folder), str(place)).eval()
    samples = draw_samples(0, 4, folder)
    for sample, expected in zip(samples, one.score(samples), strict=True):
        assert completion_logps(read, sample) == pytest.approx(expected, abs=1e-5)
    shake_adapter(one.model, 2)
    assert one.publish().checksum != published.checksum


# --- Checkpoints -----------------------------------------------------------------------------------------------------


@WITH_OTHERS
def test_a_restored_adapter_goes_on_bit_for_bit(kind: str, folder: Path, tmp_path: Path) -> None:
    unbroken = trainee(folder, kind=kind)
    learn(unbroken, folder, 0)
    unbroken.save(tmp_path)
    expected = learn(unbroken, folder, 1)
    second = trainee(folder, kind=kind)
    for module in filter(None, (second.model, second.reference, *second.critics)):
        shake_adapter(module, 9)
    second.restore(tmp_path)
    assert second.trainer.version == 1
    assert learn(second, folder, 1) == expected
    assert second.weights() == unbroken.weights()


@pytest.mark.parametrize("kind", ["grpo with kl", "ppo"])
def test_a_checkpoint_has_the_adapter_and_no_other_weights(kind: str, folder: Path, tmp_path: Path) -> None:
    one = trainee(folder, kind=kind)
    learn(one, folder, 0)
    one.save(tmp_path)
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    adapter = {"adapter_config.json", "adapter_model.safetensors"}
    expected = {"optimizer.pt", "trainer.json", *(f"policy/{name}" for name in adapter)}
    if kind == "grpo with kl":
        expected |= {f"reference/{name}" for name in adapter}
    assert files == expected
    state = torch.load(tmp_path / "optimizer.pt", weights_only=True)
    assert len(state["policy_optimizer"]["state"]) == 2 * 2 * 7
    if kind == "ppo":
        assert len(state["critic"]) == 2 * 2 * 7 + 2
        assert not [name for name in state["critic"] if "base_layer" in name]


def test_a_checkpoint_of_another_rank_is_refused(folder: Path, tmp_path: Path) -> None:
    trainee(folder, adapter=LoraSettings(2, 4.0)).save(tmp_path)
    one = trainee(folder)
    before = one.weights()
    with pytest.raises(UsageError, match=r"lora_A\.weight is \(2, 16\) instead of \(3, 16\)"):
        one.restore(tmp_path)
    assert one.weights() == before


@BOTH
def test_a_merged_checkpoint_plays_like_the_adapted_model(folder: Path, tmp_path: Path) -> None:
    one = trainee(folder)
    shake_adapter(one.model, 1)
    one.save(tmp_path)
    model = open_model(folder)
    merge_adapter(model, tmp_path / "policy")
    names = {name for name, _ in open_model(folder).named_parameters()}
    assert {name for name, weight in model.named_parameters() if weight.requires_grad} == names
    samples = draw_samples(0, 4, folder)
    for sample, expected in zip(samples, one.score(samples), strict=True):
        assert completion_logps(model, sample) == pytest.approx(expected, abs=1e-5)
