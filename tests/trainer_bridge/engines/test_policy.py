"""The policy of a run: made on the spot or read from a folder, once to learn and once to play."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants

from envkit import clock, config
from envkit.config import RunConfig
from envkit.config.parts import AutoRendererSection
from envkit.errors import UsageError
from envkit.trainer_bridge.render import ChatRenderer, PlainRenderer
from envkit.trainer_bridge.weights.files import checksum
from envkit.types import Exchange, Observation, Sample, SamplingParams
from envkit.wiring import environments
from envkit.wiring.training import resolve
from envkit.wiring.training.torch_parts import find_model
from tests.trainer_bridge.models import sample, write_tiny
from tests.trainer_bridge.policies import LocalPolicy, load_policy, open_policy
from tests.trainer_bridge.trainees import draw_samples

TINY = {"hidden_size": 16, "layers": 1, "device": "cpu"}


def run_of(env_id: str = "FrozenLake-v0", *, seed: int = 5, **sections: Any) -> RunConfig:
    content = {
        "seed": seed,
        "env": {"id": env_id, "num_envs": 4},
        "engine": TINY,
        "threads": 1,
        **sections,
    }
    return resolve.resolve(config.parse(content))


def train(policy: LocalPolicy, samples: Sequence[Sample]) -> None:
    async def main() -> None:
        await policy.trainer.accumulate(samples)
        await policy.trainer.update()

    clock.run(main)


def weights(policy: LocalPolicy) -> torch.Tensor:
    return torch.cat([weight.detach().flatten() for weight in policy.model.parameters()])


# --- Made on the spot ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("env_id", ["FrozenLake-v0", "Sokoban-v0"])
def test_a_tiny_policy_knows_every_word_of_its_environment_and_needs_one_token_for_a_move(
    env_id: str, tmp_path: Path
) -> None:
    run = run_of(env_id)
    policy = open_policy(run)
    assert isinstance(policy.renderer, PlainRenderer)
    with environments.make(env_id, **run.envs[0].options) as env:
        for seed in range(500, 530):
            text, info = env.reset(seed=seed)
            ended = False
            while not ended:
                assert policy.tokenizer.unk_token_id not in policy.renderer.open(Observation(text))
                text, _, terminated, truncated, _ = env.step(f"<answer>{info['legal_moves'][seed % 4]}</answer>")
                ended = terminated or truncated
    for move in info["legal_moves"]:
        (token,) = policy.renderer.demonstrate(f"<answer>{move}</answer>")
        assert token != policy.tokenizer.unk_token_id


def test_the_largest_seed_makes_a_policy_and_its_critic_and_trains_them(tmp_path: Path) -> None:
    run = run_of(seed=2**63 - 1, algorithm={"preset": "ppo"})
    policy = open_policy(run)
    before = weights(policy).clone()
    train(policy, [sample([1, 3], ([4 + number], ()), rewards=[float(number)]) for number in range(2)])
    assert not torch.equal(weights(policy), before)


def test_an_episode_too_short_for_a_single_turn_is_refused() -> None:
    # A lake of 4x4: the beginning, 16 cells, 4 ends of lines, <answer>, and the move.
    needed = 1 + 16 + 4 + 1 + 1
    with pytest.raises(UsageError) as caught:
        open_policy(run_of(rollout={"max_tokens": 8}))
    assert str(caught.value) == (
        "rollout.max_tokens: 8 is too small for the first observation of FrozenLake-v0 and the answer to it; "
        f"use at least {needed}"
    )
    open_policy(run_of(rollout={"max_tokens": needed}))


def test_a_trainer_takes_the_temperature_that_episodes_are_sampled_at(tmp_path: Path) -> None:
    run = run_of(rollout={"temperature": 0.6})
    policy = open_policy(run)
    assert policy.trainer._settings.temperature == 0.6


# --- Read from a folder ----------------------------------------------------------------------------------------------


def test_a_folder_is_read_twice_and_its_template_decides_how_words_are_framed(
    tiny_folder: Path, chat_folder: Path
) -> None:
    plain, chat = load_policy(str(tiny_folder), device="cpu"), load_policy(str(chat_folder), device="cpu")
    assert isinstance(plain.renderer, PlainRenderer)
    assert isinstance(chat.renderer, ChatRenderer)
    assert "LlamaForCausalLM with 5,504 parameters on cpu" in plain.description
    assert plain.model is not plain.engine._model


def test_a_model_stops_where_its_generation_config_and_its_template_say(chat_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(chat_folder, tmp_path / "model")
    file = folder / "generation_config.json"
    before = load_policy(str(folder), device="cpu").renderer.stop
    file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token_id": [5, 7, before[0]]}))
    assert load_policy(str(folder), device="cpu").renderer.stop == (before[0], 5, 7)
    file.unlink()
    assert load_policy(str(folder), device="cpu").renderer.stop == before


def test_settings_of_the_renderer_reach_the_prompt(tiny_folder: Path, chat_folder: Path) -> None:
    settings = AutoRendererSection(system="Be brief.", history=1)
    renderer = load_policy(str(chat_folder), device="cpu", renderer=settings).renderer
    texts = ["<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"]
    assert renderer.text(renderer.open(Observation("a wall"))) == "a wall".join(texts)
    later = renderer.extend([Exchange(Observation("a wall"), renderer.demonstrate("up"))], Observation("you"))
    assert (renderer.text(later.ids), later.starts_sample) == ("you".join(texts), True)
    with pytest.raises(UsageError, match=f"^{tiny_folder} has no chat template, which the setting 'system' needs"):
        load_policy(str(tiny_folder), device="cpu", renderer=settings)


def refusal(folder: Path) -> str:
    with pytest.raises(UsageError) as caught:
        load_policy(str(folder), device="cpu")
    text = str(caught.value)
    assert text.startswith(f"cannot load {folder}: ")
    assert "\n" not in text
    return text


def test_a_name_of_the_hub_that_cannot_be_reached_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # The hub's client reads these settings when it is imported.
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(UsageError) as caught:
        find_model("nobody/none")
    assert str(caught.value) == (
        "cannot load nobody/none: no such folder or cached model, "
        "and the hub lacks it or is unreachable; name a model folder, or one of `envkit model list`"
    )


@pytest.mark.parametrize(
    ("name", "damage"), [("config.json", "empty"), ("model.safetensors", "garbled"), ("tokenizer.json", "missing")]
)
def test_a_damaged_model_folder_is_refused_in_one_line(name: str, damage: str, tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "policy", seed=1)
    if damage == "missing":
        (folder / name).unlink()
        (folder / "tokenizer_config.json").unlink()
    else:
        (folder / name).write_bytes(b"" if damage == "empty" else b"\xff\x00 nonsense " * 20)
    refusal(folder)


# --- Numbers of two formats ------------------------------------------------------------------------------------------


def test_a_small_update_reaches_the_weights_that_learn_although_those_that_play_are_rounded(
    tiny_folder: Path, tmp_path: Path
) -> None:
    engine = {**TINY, "dtype": "bfloat16", "model": str(tiny_folder)}
    policy = open_policy(run_of(threads=1, trainer={"learning_rate": 1e-6}, engine=engine))
    playing = policy.engine._model
    assert {weight.dtype for weight in policy.model.parameters()} == {torch.float32}
    assert {weight.dtype for weight in playing.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in playing.buffers()} == {buffer.dtype for buffer in policy.model.buffers()}
    before = weights(policy).clone()
    train(policy, draw_samples(0, 8, tiny_folder))
    changed = (weights(policy) != before).float().mean()
    assert changed > 0.5

    with torch.no_grad():
        for weight in policy.model.parameters():
            weight.add_(0.1)

    async def play() -> None:
        published = await policy.trainer.publish()
        assert (published.version, published.location) == (1, "")  # nothing is written: the engine copies
        assert published.checksum == checksum(policy.model, torch.bfloat16)
        await policy.engine.load(published)
        completion = await policy.engine.generate([1, 5, 6], SamplingParams(max_tokens=3, seed=4))
        assert len(completion.token_ids) == 3

    clock.run(play, virtual=True)
    assert {weight.dtype for weight in playing.parameters()} == {torch.bfloat16}
    for learned, played in zip(policy.model.parameters(), playing.parameters(), strict=True):
        assert torch.equal(learned.bfloat16(), played)
