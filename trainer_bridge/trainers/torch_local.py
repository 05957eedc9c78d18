"""The trainer for one process and one device.

The trainer has the plan: a train step computes the advantages of all episodes, and then makes `epochs` * `minibatches`
updates. Its `Learner` computes log-probabilities and gradients.

Axes: E episodes, T turns, K critics, N tokens that contribute to the loss.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import torch

from envkit import clock
from envkit.errors import UsageError
from envkit.runs.files import share_weights, writing
from envkit.types import Floats, Sample, TrainPhase, Weights

from ..algorithms import terms
from ..algorithms.algorithm import Algorithm, imitation
from ..algorithms.critic import critics_and_reference, policy_turns
from ..algorithms.parts import Advantages
from ..threads import torch_threads
from ..weights import files, lora
from . import checkpoint
from .batching import TrainRows, minibatches, without_repeats
from .learner import Learner, Sums, TrainerSettings, peak_memory_mib, rate_factor
from .rollouts import rollouts_of

__all__ = ["TorchTrainer", "TrainerSettings"]

MAX_NONFINITE_UPDATES = 3
"""Number of updates in a row without a finite gradient after which a run ends."""

_PER_TOKEN = ("policy_loss", "advantage_abs", "reference_kl")
"""Metrics that are averaged over the tokens of all samples, and not only of those that are not skipped."""


class TorchTrainer:
    """Trains a causal language model; implements `envkit.protocols.Trainer`.

    `update`, `score`, `publish`, `copy_to`, `save` and `restore` wait for each other: none sees half an update.

    Args:
        model: The policy, on its device.
        algorithm: The algorithm of reinforcement learning, with which the trainer begins.
        settings: Settings of the optimisers.
        folder: Folder for `publish`; None if the engine copies the weights within this process.
        engine_dtype: Number format of the engine's weights, for the file and the checksum of `publish`.
        tokenizer: Tokenizer to save with the policy, so that a checkpoint is a complete model folder.
        publishes_adapter: Whether `publish` writes only the model's LoRA adapter; otherwise, all weights with the
            adapter added.
        teacher: The reference policy; None for the policy at the start of reinforcement learning.
    """

    def __init__(
        self,
        model: Any,
        algorithm: Algorithm,
        settings: TrainerSettings,
        folder: Path | None,
        *,
        engine_dtype: str = "float32",
        tokenizer: Any = None,
        publishes_adapter: bool = False,
        teacher: Any = None,
    ) -> None:
        self._model = model
        self._teacher = teacher
        self._kl = terms.AdaptiveKl(algorithm.section.kl)
        self._tokenizer = tokenizer
        self._reinforcement = algorithm
        self._engine_dtype: torch.dtype = getattr(torch, engine_dtype)
        self._settings = settings
        self._folder = folder
        self._publishes_adapter = publishes_adapter
        self._lock = anyio.Lock()
        self._phases = 0
        self._begin("reinforcement", settings.steps)

    async def begin(self, phase: TrainPhase, steps: int) -> None:
        """See `envkit.protocols.PhasedTrainer.begin`."""
        async with self._lock:
            await clock.to_thread(self._begin, phase, steps)

    def _begin(self, phase: TrainPhase, steps: int) -> None:
        model, settings = self._model, self._settings
        self._learner: Learner
        if self._phases:  # release moments, critics and reference of the phase before, as memory is needed for new ones
            del self._learner
            model.zero_grad(set_to_none=True)
        self._phases += 1
        self._phase, self._steps = phase, steps
        self._algorithm = imitation() if phase == "imitation" else self._reinforcement
        critics, reference = critics_and_reference(model, self._algorithm, self._teacher)
        self._learner = Learner(
            model,
            self._algorithm,
            settings,
            critics=critics,
            reference=reference,
            imitates=phase == "imitation",
        )
        self._samples: list[Sample] = []
        self._nonfinite = 0
        self.version = 0

    @property
    def description(self) -> str:
        """What is trained, in one line, if the model has a LoRA adapter; otherwise empty."""
        return lora.description(self._model)

    @property
    def checkpoint_bytes(self) -> int:
        """Size of a checkpoint after the first update: the trained weights and two moments of each in the optimizer."""
        models = [self._model, *self._learner.critics]
        return sum(12 * one.numel() for model in models for one in model.parameters() if one.requires_grad)

    async def accumulate(self, samples: Sequence[Sample]) -> None:
        """See `envkit.protocols.Trainer.accumulate`."""
        self._samples += samples

    async def update(self) -> dict[str, float]:
        """Update the policy from the accumulated samples, then discard the samples.

        Returns:
            The metrics of the train step. Those of tokens (for value_loss, of the critic's values) are means over all
            updates with finite gradients, whatever the aggregation: policy_loss, advantage_abs and reference_kl over
            all tokens; entropy_nats, approx_kl (k3 estimate relative to the old log-probabilities), correction_factor
            and those of the loss, such as clip_share, over the learned_tokens: those of all samples but the
            skipped_samples, whose advantages are 0. sampler_gap_nats is the mean absolute difference between the
            log-probabilities of engine and trainer for the same weights, in the first update that learns; it is absent
            if none of its tokens is of these weights. repeated_samples were left out, because others have their turns.

        Raises:
            UsageError: `MAX_NONFINITE_UPDATES` updates in a row had gradients that are not finite.
        """
        async with self._lock:
            samples, self._samples = self._samples, []
            return await clock.to_thread(self._update, samples)

    async def score(self, samples: Sequence[Sample]) -> list[Floats]:
        """See `envkit.protocols.Trainer.score`."""
        async with self._lock:
            return await clock.to_thread(self._score, samples)

    async def publish(self) -> Weights:
        """See `envkit.protocols.Trainer.publish`. The caller removes the file or folder once no engine needs it.

        Without a folder, nothing is written, and the engine copies the weights by `copy_to`.

        Raises:
            UsageError: The disk is full or the folder cannot be written.
        """
        async with self._lock:
            return await clock.to_thread(self._publish)

    async def copy_to(self, model: Any) -> int:
        """Copy the weights into `model`, rounded to its data types, and return their version."""
        async with self._lock:
            await clock.to_thread(files.copy_weights, self._model, model)
            return self.version

    async def save(self, folder: str) -> None:
        """See `envkit.protocols.Trainer.save`. The policy is saved in ``policy/`` as an ordinary model folder."""
        async with self._lock:
            await clock.to_thread(self._save, Path(folder))

    async def restore(self, folder: str) -> None:
        """See `envkit.protocols.Trainer.restore`."""
        async with self._lock:
            await clock.to_thread(self._restore, Path(folder))

    def _update(self, given: Sequence[Sample]) -> dict[str, float]:
        if not given:
            raise ValueError("update() without samples; call accumulate() first")
        settings, algorithm = self._settings, self._algorithm
        samples = without_repeats(given) if algorithm.advantage is not None else given
        sums: Sums = defaultdict(float, policy_loss=0.0, advantage_abs=0.0)  # also if nothing is learned
        factor = self._rate_factor()
        rate = factor * (settings.imitation_rate if self._phase == "imitation" else settings.learning_rate)
        critic_rate = settings.critic_learning_rate * factor
        first_gap = None if any(sample.ignored.any() for sample in samples) else 0.0
        with torch_threads(settings.threads):
            rows = self._prepare(samples).without_ignored()
            kept = [number for number, sample in enumerate(rows.samples) if sample.mask.any()]
            for chosen in minibatches(
                [samples[number].group for number in kept],
                [rows.samples[number].num_policy_tokens for number in kept],
                algorithm.section.minibatches,
                algorithm.section.epochs,
                seed=settings.seed * 1_000_003 + self.version,
            ):
                indices = [kept[place] for place in chosen]
                has_learned = sums["learned_tokens"] > 0  # an update without advantages computes no log-probabilities
                for key, value in self._learn(rows, indices, rate, critic_rate).items():
                    sums[key] += value
                if not has_learned and sums["learned_tokens"] > 0:
                    first_gap = sums["sampler_gap"] / sums["current_tokens"] if sums["current_tokens"] else None
        self.version += 1
        updates = sums["updates"] + sums["skipped_updates"]
        counts = {key: sums.pop(key, 0.0) for key in ("updates", "skipped_updates", "nonfinite_updates")}
        tokens, values = max(sums.pop("tokens", 0.0), 1.0), max(sums.pop("values", 0.0), 1.0)
        learned, skipped = sums.pop("learned_tokens", 0.0), sums.pop("skipped_samples", 0.0)
        grad_norm = sums.pop("grad_norm", 0.0) / max(updates, 1.0)
        for key in ("sampler_gap", "current_tokens"):
            sums.pop(key, None)
        divisor = {**dict.fromkeys(_PER_TOKEN, tokens), "value_loss": values}
        means = {key: value / divisor.get(key, max(learned, 1.0)) for key, value in sums.items()}
        if algorithm.needs_reference:
            means |= {
                "kl_coefficient": self._kl.coefficient,
                "reference_kl": means.get("reference_kl", rows.divergence),
            }
            self._kl.adapt(means["reference_kl"], episodes=len(set(rows.rollouts)))
        return {
            **means,
            "samples": float(len(samples)),
            **counts,
            "grad_norm": grad_norm,
            **({} if first_gap is None else {"sampler_gap_nats": first_gap}),
            "learning_rate": rate,
            "learned_tokens": learned,
            "skipped_samples": skipped,
            "repeated_samples": float(len(given) - len(samples)),
            "peak_memory_mib": peak_memory_mib(self._model.device),
        }

    def _rate_factor(self) -> float:
        """Return the factor of the learning rates in this train step or update of imitation."""
        settings = self._settings
        if self._phase == "imitation":
            return rate_factor("cosine", self.version, steps=self._steps, warmup_steps=0)
        warmup = settings.schedule_warmup_steps
        return rate_factor(settings.schedule, self.version, steps=self._steps, warmup_steps=warmup)

    def _publish(self) -> Weights:
        model, dtype = self._model, self._engine_dtype
        # Versions begin anew in each phase, but an engine may still read the file of the phase before.
        name = f"version-{self.version}" if self._phases == 1 else f"version-{self._phases}-{self.version}"
        if self._folder is not None and self._publishes_adapter:
            path = self._folder / name
            with writing(path):
                lora.save_adapter(model, path)
            checksum = files.checksum_of(lora.adapter_weights(model).values(), dtype)
            return Weights(self.version, str(path), checksum, adapter=True)
        checksum = files.checksum(model, dtype)
        if self._folder is None:
            return Weights(self.version, "", checksum)
        path = self._folder / f"{name}.safetensors"
        with writing(path):
            self._folder.mkdir(parents=True, exist_ok=True)
            path = files.save_weights(model, path, dtype, shard_bytes=self._settings.shard_mib << 20)
            share_weights(self._folder)
        return Weights(self.version, str(path), checksum)

    def _save(self, folder: Path) -> None:
        about = checkpoint.About(self.version, self._phase, self._steps)
        size = self._settings.shard_mib << 20
        if self._tokenizer is not None:
            self._tokenizer.save_pretrained(folder / "policy")
        checkpoint.save(folder, self._model, self._own_reference(), self._state(), about, shard_bytes=size)

    def _restore(self, folder: Path) -> None:
        about = checkpoint.about(folder)
        if about.phase != self._phase:
            self._begin(about.phase, about.steps)
        checkpoint.restore(folder, self._model, self._own_reference(), self._state())
        self.version = about.version

    def _own_reference(self) -> Any:
        return self._learner.reference if self._teacher is None else None  # a teacher has a folder of its own

    def _state(self) -> dict[str, checkpoint.Stateful]:
        adapts = self._phase == "reinforcement" and self._algorithm.section.kl.target is not None
        return {**self._learner.state(), **({"kl": self._kl} if adapts else {})}

    def _score(self, samples: Sequence[Sample]) -> list[Floats]:
        with torch_threads(self._settings.threads):
            return self._learner.score(samples)[0]

    def _prepare(self, samples: Sequence[Sample]) -> TrainRows:
        """Compute what is the same in all updates of a train step: advantages, targets, old log-probabilities."""
        algorithm, learner = self._algorithm, self._learner
        first: dict[str, Sample] = {}
        if algorithm.advantage is not None:
            for sample in samples:
                first.setdefault(sample.episode, sample)
        place = {episode: number for number, episode in enumerate(first)}
        if "sequences" in algorithm.needs and len(first) < len(samples):
            reason = (
                "compares whole episodes, but some are several samples: their prompts do not continue earlier turns"
            )
            raise UsageError(
                f"algorithm: a part {reason}; use another part, or a chat template that keeps earlier turns"
            )
        rollouts = [place.get(sample.episode, number) for number, sample in enumerate(samples)]
        sampled = [sample.logprobs[sample.mask] for sample in samples]
        recomputes = algorithm.section.old_logprobs == "recomputed"
        old, entropies = learner.score(samples) if recomputes else (sampled, [])
        reference = learner.score(samples, of_reference=True)[0] if algorithm.needs_reference else []
        nothing = [np.zeros_like(one) for one in sampled]
        plain = TrainRows(samples, rollouts, nothing, old, [], [], reference, version=self.version)
        if algorithm.advantage is None:
            return plain
        turns = [policy_turns(sample) for sample in samples]
        with_ends = learner.values(samples) if algorithm.critics else []
        values, ends = [one[:, :-1] for one in with_ends], [one[:, -1] for one in with_ends]
        per_token = "token_values" in algorithm.needs
        given = rollouts_of(plain, algorithm, values, ends, entropies, kl_coefficient=self._kl.coefficient)
        given = replace(given, model=self._model)
        made: Advantages = algorithm.advantage(given)
        bound, advantage_N, weight_N = algorithm.section.advantage_clip, made.advantage_N, made.entropy_weight_N
        if bound is not None:
            advantage_N = advantage_N.clamp(-bound, bound)
        targets: Sequence[torch.Tensor] = []
        if made.targets is not None and per_token:
            targets = torch.split(made.targets, [sample.num_policy_tokens for sample in samples], 1)
        elif made.targets is not None:
            targets = [made.targets[:, row, of_sample] for row, of_sample in zip(rollouts, turns, strict=True)]
        loss, correction = algorithm.loss, algorithm.correction
        prepare = loss.part.prepare
        return replace(
            plain,
            advantages=plain.split(advantage_N),
            factors=[]
            if correction is None
            else plain.split(correction(given.old_logp_N, given.sampled_logp_N, given.segments)),
            targets=targets,
            values=values,
            prepared=[] if prepare is None else plain.split(prepare(given, advantage_N, loss.section)),
            entropy_weights=[] if weight_N is None else plain.split(weight_N),
            divergence=0.0
            if given.reference_logp_N is None
            else float(
                terms.kl_estimate(given.old_logp_N, given.reference_logp_N, algorithm.section.kl.estimator).mean()
            ),
            kl_coefficient=self._kl.coefficient if algorithm.section.kl.place == "loss" else 0.0,
        )

    def _learn(self, rows: TrainRows, indices: Sequence[int], rate: float, critic_rate: float) -> Mapping[str, float]:
        """Make one update from the samples at `indices`, and return its sums.

        An update whose gradients are not finite changes nothing, and only its number is returned.
        """
        algorithm, learner = self._algorithm, self._learner
        segments = rows.segments(indices)
        weight_N = algorithm.aggregation(segments).float().numpy()
        sizes = [rows.samples[row].num_policy_tokens for row in indices]
        weights = dict(zip(indices, np.split(weight_N, np.cumsum(sizes)[:-1]), strict=True))
        learned = [row for row in indices if self._has_gradient(rows, row)]
        if "whole_rollouts" in algorithm.needs:  # the other samples of a rollout have a part in its loss
            whole = {rows.rollouts[row] for row in learned}
            learned = [row for row in indices if rows.rollouts[row] in whole]
        sums = {**learner.learn(rows, learned, weights), **learner.learn_values(rows, indices)}
        try:
            norm = learner.step(rate, critic_rate, number=self.version + 1)
        except UsageError:
            self._nonfinite += 1
            if self._nonfinite >= MAX_NONFINITE_UPDATES:
                raise
            return {"nonfinite_updates": 1.0}
        if norm > 0:
            self._nonfinite = 0
        return {
            **sums,
            "updates" if norm > 0 else "skipped_updates": 1.0,
            "tokens": sum(sizes),
            "grad_norm": norm,
            "learned_tokens": sum(rows.samples[row].num_policy_tokens for row in learned),
            "skipped_samples": len(indices) - len(learned),
        }

    def _has_gradient(self, rows: TrainRows, row: int) -> bool:
        """Return whether the sample at index `row` may have a gradient."""
        algorithm = self._algorithm
        if algorithm.section.entropy_coefficient > 0 or rows.kl_coefficient > 0:
            return True
        return "advantages" not in algorithm.loss.needs or bool(rows.advantages[row].any())
