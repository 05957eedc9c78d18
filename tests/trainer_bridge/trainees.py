"""Trainers of small policies and samples for them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import torch

from envkit.trainer_bridge.algorithms import catalogue
from envkit.trainer_bridge.algorithms.critic import Critic, critic_and_reference
from envkit.trainer_bridge.trainers.torch_local import TorchTrainer, TrainerSettings
from envkit.trainer_bridge.weights.lora import LoraSettings, add_adapter
from envkit.types import Floats, Sample, Weights
from tests.trainer_bridge.models import open_model, sample, shake, slow_logps

KINDS: dict[str, dict[str, Any]] = {
    "grpo": {"preset": "grpo"},
    "grpo with kl": {"preset": "grpo", "kl_coefficient": 0.1, "entropy_coefficient": 0.02},
    "reinforce": {"preset": "reinforce", "entropy_coefficient": 0.01},
    "ppo": {"preset": "ppo", "epochs": 2},
}
"""Every part of a loss is in one of them."""


class Trainee:
    """A trainer, and what it trains.

    Args:
        folder: Of the policy that it starts from.
        weights: Where it publishes; None for a copy in memory.
        engine_dtype: Number format of the published weights.
        adapter: Train a LoRA adapter with these settings, from a policy that is its reference and its critic's start.
        base_dtype: Number format of the weights beside the adapter.
        publishes_adapter: As in `TorchTrainer`.
        how: Preset and changes, as for `catalogue.resolve`; the rest are settings of the trainer.
    """

    def __init__(
        self,
        folder: Path,
        weights: Path | None,
        *,
        preset: str,
        engine_dtype: str = "float32",
        adapter: LoraSettings | None = None,
        base_dtype: torch.dtype = torch.float32,
        publishes_adapter: bool = False,
        **how: Any,
    ) -> None:
        settings: dict[str, Any] = {
            "learning_rate": 1e-2,
            "critic_learning_rate": 1e-2,
            "max_grad_norm": 1e9,
            "micro_tokens": 10**6,
            "seed": 3,
        }
        of_settings = {field.name for field in fields(TrainerSettings)}
        changes = {name: value for name, value in how.items() if name not in of_settings}
        settings |= {name: value for name, value in how.items() if name in of_settings}
        self.algorithm = catalogue.resolve(preset, changes)
        self.model = open_model(folder)
        self.critic: Critic | None = None
        self.reference: Any = None
        if adapter is not None:
            self.model.to(base_dtype)
            add_adapter(self.model, adapter, base=str(folder), seed=settings["seed"])
            self.critic, self.reference = critic_and_reference(self.model, self.algorithm, seed=3)
        elif self.algorithm.has_critic:
            self.critic = Critic(self.model)
            shake(self.critic, seed=11)
        if self.algorithm.kl_coefficient > 0 and adapter is None:
            self.reference = open_model(folder)
            shake(self.reference, seed=12)
        self.trainer = TorchTrainer(
            self.model,
            self.algorithm,
            TrainerSettings(**settings),
            weights,
            engine_dtype=engine_dtype,
            critic=self.critic,
            reference=self.reference,
            publishes_adapter=publishes_adapter,
        )

    def update(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Train on the samples and return the metrics of the update."""

        async def main() -> dict[str, float]:
            await self.trainer.accumulate(samples)
            return await self.trainer.update()

        return anyio.run(main)

    def score(self, samples: Sequence[Sample]) -> list[list[float]]:
        return [logps.tolist() for logps in anyio.run(self.trainer.score, samples)]

    def publish(self) -> Weights:
        return anyio.run(self.trainer.publish)

    def save(self, folder: Path) -> None:
        anyio.run(self.trainer.save, str(folder))

    def restore(self, folder: Path) -> None:
        anyio.run(self.trainer.restore, str(folder))

    def gradients(self) -> dict[str, list[float]]:
        """The gradient of the last minibatch, of policy and critic."""
        modules = {"policy": self.model, **({"critic": self.critic} if self.critic is not None else {})}
        return {
            f"{kind}.{name}": weight.grad.flatten().tolist()
            for kind, module in modules.items()
            for name, weight in module.named_parameters()
            if weight.grad is not None
        }

    def weights(self) -> dict[str, list[float]]:
        """All weights of policy and critic."""
        modules = {"policy": self.model, **({"critic": self.critic} if self.critic is not None else {})}
        return {
            f"{kind}.{name}": weight.flatten().tolist()
            for kind, module in modules.items()
            for name, weight in module.named_parameters()
        }


def draw_samples(seed: int, count: int, folder: Path, *, temperature: float = 1.0) -> list[Sample]:
    """Ragged episodes of one to three turns in groups of four, as a policy near that in `folder` would play them.

    The same arguments return the same samples, so `folder` must not change.
    """
    return list(_drawn(seed, count, folder, temperature))


@cache
def _drawn(seed: int, count: int, folder: Path, temperature: float) -> list[Sample]:
    rng = random.Random(seed)
    model = open_model(folder)
    drawn = []
    for number in range(count):

        def some(low: int, high: int) -> list[int]:
            return [rng.randrange(3, 19) for _ in range(rng.randint(low, high))]

        turns = [(some(1, 3), some(1, 4)) for _ in range(rng.randint(1, 3))]
        prompt = [1, 3 + number % 16, *some(1, 5)]
        rewards = [rng.choice([0.0, 1.0, -0.1, 0.5]) for _ in turns]
        bare = sample(prompt, *turns, rewards=rewards, group=f"task-{number // 4}")
        logprobs = [logp + rng.uniform(-0.5, 0.5) for logp in completion_logps(model, bare, temperature=temperature)]
        drawn.append(with_logprobs(bare, logprobs))
    return drawn


def with_logprobs(one: Sample, logprobs: Sequence[float] | Floats) -> Sample:
    """The sample with the log-probabilities of the policy's tokens replaced."""
    spread = np.zeros(len(one.mask), dtype=np.float32)
    spread[one.mask] = logprobs
    return replace(one, logprobs=spread)


def completion_logps(model: Any, one: Sample, *, temperature: float = 1.0) -> list[float]:
    """Log-probabilities of the tokens with mask 1, one prompt after another without a cache."""
    places = [place for place, own in enumerate(one.mask) if own]
    ids = one.token_ids.tolist()
    return [slow_logps(model, ids[:place], temperature)[ids[place]] for place in places]
