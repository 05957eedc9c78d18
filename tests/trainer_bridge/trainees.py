"""Trainers of small policies and samples for them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import torch

from envkit.config.algorithm import AlgorithmSection
from envkit.trainer_bridge.algorithms.algorithm import Algorithm
from envkit.trainer_bridge.algorithms.critic import Critic
from envkit.trainer_bridge.trainers.token_logps import TokenScorer
from envkit.trainer_bridge.trainers.torch_local import TorchTrainer, TrainerSettings
from envkit.trainer_bridge.weights.lora import LoraSettings, add_adapter
from envkit.types import Floats, Sample, Weights
from tests.trainer_bridge.models import open_model, sample, shake, slow_logps

KINDS: dict[str, dict[str, Any]] = {
    "grpo": {"preset": "grpo"},
    "grpo with kl": {"preset": "grpo", "kl": {"coefficient": 0.1}, "entropy_coefficient": 0.02},
    "reinforce": {"preset": "reinforce", "entropy_coefficient": 0.01},
    "ppo": {"preset": "ppo", "epochs": 2},
    "grpo with tis": {
        "preset": "grpo",
        "aggregation": "rollout_mean",
        "correction": {"kind": "tis", "cap": 1.2},
        "old_logprobs": "recomputed",
    },
}
"""Every part is in one of them."""
ONE_UPDATE: dict[str, Any] = {"epochs": 1, "minibatches": 1, "learning_rate": 1e-30, "critic_learning_rate": 1e-30}
"""Keys with which the gradient and the report of an update are those for the weights that it started with."""


class Trainee:
    """A trainer, and what it trains.

    Args:
        folder: Of the policy that it starts from.
        weights: Where it publishes; None for a copy in memory.
        algorithm: The algorithm; None for that of a section with the keys in `how`.
        engine_dtype: Number format of the published weights.
        adapter: Train a LoRA adapter with these settings, from a policy that is its reference and its critic's start.
        dtype: Number format of the weights beside the adapter, if there is one.
        publishes_adapter: As in `TorchTrainer`.
        how: Keys of `TrainerSettings` and of the section ``algorithm``.
    """

    def __init__(
        self,
        folder: Path,
        weights: Path | None,
        *,
        algorithm: Algorithm | None = None,
        engine_dtype: str = "float32",
        adapter: LoraSettings | None = None,
        dtype: torch.dtype = torch.float32,
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
        settings |= {name: value for name, value in how.items() if name in of_settings}
        keys = {name: value for name, value in how.items() if name not in of_settings}
        self.algorithm = algorithm or algorithm_of(**keys)
        self.model = open_model(folder).to(dtype)
        if adapter is not None:
            add_adapter(self.model, adapter, base=str(folder), seed=settings["seed"])
        self.trainer = TorchTrainer(
            self.model,
            self.algorithm,
            TrainerSettings(**settings),
            weights,
            engine_dtype=engine_dtype,
            publishes_adapter=publishes_adapter,
        )
        if adapter is None:
            for number, critic in enumerate(self.critics):
                shake(critic.to(dtype), seed=11 + 2 * number)
            if self.reference is not None:
                shake(self.reference, seed=12)

    @property
    def critics(self) -> Sequence[Critic]:
        return self.trainer._learner.critics

    @property
    def reference(self) -> Any:
        return self.trainer._learner.reference

    @property
    def scorer(self) -> TokenScorer:
        return self.trainer._learner.scorer

    def imitate(self, batches: Sequence[Sequence[Sample]]) -> list[dict[str, float]]:
        """Imitate each of the batches in a phase of that many updates; return the metrics of the updates."""
        anyio.run(self.trainer.begin, "imitation", len(batches))
        return [self.update(batch) for batch in batches]

    def update(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Train on the samples and return the metrics of the update, without the memory, which no run repeats."""

        async def main() -> dict[str, float]:
            await self.trainer.accumulate(samples)
            return await self.trainer.update()

        report = anyio.run(main)
        assert report.pop("peak_memory_mib") > 0
        return report

    def score(self, samples: Sequence[Sample]) -> list[list[float]]:
        return [logps.tolist() for logps in anyio.run(self.trainer.score, samples)]

    def publish(self) -> Weights:
        return anyio.run(self.trainer.publish)

    def save(self, folder: Path) -> None:
        anyio.run(self.trainer.save, str(folder))

    def restore(self, folder: Path) -> None:
        anyio.run(self.trainer.restore, str(folder))

    def gradients(self) -> dict[str, list[float]]:
        """The gradient of the last minibatch, of policy and critics."""
        return {name: one.grad.flatten().tolist() for name, one in self._parameters() if one.grad is not None}

    def weights(self) -> dict[str, list[float]]:
        """All weights of policy and critics."""
        return {name: one.flatten().tolist() for name, one in self._parameters()}

    def _parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        for kind, module in [("policy", self.model), *(("critic", critic) for critic in self.critics)]:
            yield from ((f"{kind}.{name}", one) for name, one in module.named_parameters())


def algorithm_of(**keys: Any) -> Algorithm:
    """The algorithm of a section."""
    return Algorithm.of(AlgorithmSection.model_validate(keys))


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


def groups(seed: int, *, count: int = 3, members: int = 4) -> list[Sample]:
    """Ragged episodes of one to three turns whose groups share the first prompt."""
    rng = random.Random(seed)

    def some(low: int, high: int) -> list[int]:
        return [rng.randrange(1, 19) for _ in range(rng.randint(low, high))]

    drawn = []
    for group in range(count):
        prompt = some(8, 14)
        for member in range(members):
            turns = [(some(1, 4), some(1, 3)) for _ in range(rng.randint(1, 3))]
            rewards = [float(member % 2), *(0.5 * turn for turn in range(1, len(turns)))]
            generated = sum(len(one) for one, _ in turns)
            logprobs = [-rng.uniform(1.0, 4.0) for _ in range(generated)]
            drawn.append(sample(prompt, *turns, rewards=rewards, logprobs=logprobs, group=str(group)))
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
