"""Training with the engine vllm on a real server: updates, adapters, diagnostics."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from envkit import clock, config
from envkit.runs.display import SilentDisplay
from envkit.trainer_bridge.trainers.torch_local import TorchTrainer, TrainerSettings
from envkit.trainer_bridge.weights.channel import WeightChannel, weights_folder
from envkit.trainer_bridge.weights.lora import LoraSettings, add_adapter
from envkit.types import SamplingParams
from envkit.wiring.training.run import train
from tests.contract.engines.rigs import PROMPT, TOLERANCE_NATS, VllmRig, disturb, score
from tests.contract.engines.vllm_server import LORA_RANK
from tests.trainer_bridge.models import open_model
from tests.trainer_bridge.trainees import algorithm_of

pytestmark = pytest.mark.vllm
HOW = SamplingParams(max_tokens=12, seed=3)


def trainer_of(model: Any, folder: Path, **how: Any) -> TorchTrainer:
    settings = TrainerSettings(
        learning_rate=1e-4, critic_learning_rate=1e-4, max_grad_norm=1.0, micro_tokens=512, seed=7, threads=1
    )
    return TorchTrainer(model, algorithm_of(), settings, folder, **how)


def test_the_log_probabilities_agree_after_each_of_two_updates(
    vllm_rig: VllmRig, model_folder: Path, tmp_path: Path
) -> None:
    vllm_rig.is_changed = True

    async def main() -> None:
        model = open_model(model_folder)
        with weights_folder(tmp_path) as folder:
            trainer = trainer_of(model, folder)
            async with vllm_rig.opened() as engine:
                channel, outputs, checksums = WeightChannel(trainer, engine), set(), set()
                for version in (1, 2):
                    disturb(model, version)
                    trainer.version = version
                    checksums.add((await channel.push()).weights.checksum)
                    got = await engine.generate(PROMPT, HOW)
                    assert got.versions == ((version, 12),)
                    assert np.abs(score(model, got) - got.logprobs).mean() <= TOLERANCE_NATS
                    outputs.add((*got.token_ids.tolist(), *got.logprobs.round(3).tolist()))
                assert (len(outputs), len(checksums)) == (2, 2)

    clock.run(main)


def test_a_server_that_shares_no_files_fetches_each_version_and_loads_it(
    vllm_rig: VllmRig, model_folder: Path, tmp_path: Path
) -> None:
    vllm_rig.is_changed = True
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"

    async def main() -> None:
        model = open_model(model_folder)
        with weights_folder(tmp_path) as folder:
            trainer = trainer_of(model, folder)
            async with vllm_rig.opened(weights_url=url) as engine:
                for version in (1, 2):
                    with torch.no_grad():
                        model.get_input_embeddings().weight[354 + version].mul_(1.5)
                    disturb(model.model.norm, version, scale=0.1)
                    trainer.version = version
                    weights = await trainer.publish()
                    await engine.fetch(weights)
                    await engine.load(weights)
                    got = await engine.generate(PROMPT, HOW)
                    assert got.versions == ((version, 12),)
                    assert np.abs(score(model, got) - got.logprobs).mean() <= TOLERANCE_NATS

    clock.run(main)


def test_the_log_probabilities_agree_for_two_adapters_in_place(
    vllm_rig: VllmRig, model_folder: Path, tmp_path: Path
) -> None:
    async def main() -> None:
        if vllm_rig.is_changed:  # an adapter is added to the weights that the server has
            async with vllm_rig.opened() as engine:
                await engine.load(vllm_rig.policies.weights[0])
            vllm_rig.is_changed = False
        # It has the weights that it started with, but may not know that.
        async with httpx.AsyncClient(base_url=vllm_rig.process.url) as client:
            (await client.post("/update_weight_version", json={"new_version": "default"})).raise_for_status()
        model = open_model(model_folder)
        add_adapter(model, LoraSettings(rank=LORA_RANK, alpha=16.0), base=str(model_folder), seed=1)
        trainer = trainer_of(model, tmp_path, publishes_adapter=True)
        async with vllm_rig.opened(takes_adapters=True) as engine:
            for version in (1, 2):
                generator = torch.Generator().manual_seed(version)
                with torch.no_grad():
                    for weight in model.parameters():
                        if weight.requires_grad:
                            weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.02)
                trainer.version = version
                await engine.load(await trainer.publish())
                got = await engine.generate(PROMPT, HOW)
                assert got.versions == ((version, 12),)
                assert np.abs(score(model, got) - got.logprobs).mean() <= TOLERANCE_NATS
                assert np.abs(score(vllm_rig.policies.models[0], got) - got.logprobs).mean() > 0.01
        async with vllm_rig.opened() as engine:  # without an adapter, it has the weights from before
            assert vllm_rig.policies.agree(await engine.generate(PROMPT, HOW))

    clock.run(main)


def test_asynchronous_train_steps_on_a_server_have_no_finding(
    vllm_rig: VllmRig, model_folder: Path, tmp_path: Path
) -> None:
    vllm_rig.is_changed = True
    run = config.parse(
        {
            "env": {"id": "Arithmetic-v0", "num_envs": 4, "options": {"operands": [1, 9], "instructions": False}},
            "engine": {"kind": "vllm", "model": str(model_folder), "dtype": "float32", "url": vllm_rig.process.url},
            "renderer": {"system": ""},
            "rollout": {"group_size": 2, "max_turns": 1, "max_tokens": 64, "turn_tokens": 6, "asynchronous": True},
            # With an entropy bonus, the weights change even if all rewards are the same.
            "algorithm": {"preset": "grpo", "minibatches": 1, "entropy_coefficient": 0.001},
            "trainer": {
                "steps": 2,
                "groups_per_step": 2,
                "learning_rate": 2e-5,
                "micro_tokens": 512,
                "precision": "float32",
                "checkpoint_every": 100,
            },
            "evaluation": {"episodes": 0},
        }
    )

    async def main() -> Any:
        return await train(run, tmp_path / "run", resume=False, force=False, display=SilentDisplay())

    summary = clock.run(main)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    gaps = [row["sampler_gap_nats"] for row in rows if "sampler_gap_nats" in row]  # absent if all tokens are older
    assert gaps
    assert all(gap <= TOLERANCE_NATS for gap in gaps)
    assert all(row["lag_max"] <= 4 for row in rows)
    assert rows[1]["lag_mean"] > 0
    assert summary["accounting"]["tokens_sampled"] == summary["accounting"]["tokens_trained"]
    assert all(row["grad_norm"] > 0 for row in rows)
    names = {one["name"] for one in summary["diagnosis"]}
    assert names <= {
        "completions_cut_off",
        "every_group_filtered",
        "no_valid_action",
    }  # of a policy that must learn yet
