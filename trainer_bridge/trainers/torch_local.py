"""The trainer for one process and one device.

A train step computes the advantages of all episodes, and then makes `epochs` * `minibatches` optimiser updates. The
gradient of an update is summed over passes of at most `micro_tokens` tokens. The old log-probabilities, to which ratios
are relative, are those recorded in the samples, or are recomputed before the first update.

Axes: E episodes, L tokens, T turns, N tokens that contribute to the loss.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import torch
from torch import Tensor

from envkit import clock
from envkit.errors import UsageError
from envkit.runs.files import writing
from envkit.types import Floats, Sample, Weights, floats

from ..algorithms import losses
from ..algorithms.advantages import Advantages, Rollouts
from ..algorithms.catalogue import Algorithm
from ..algorithms.critic import Critic, critic_and_reference, policy_turns
from ..algorithms.losses import PolicyLoss, Tokens
from ..stopping import Stop
from ..threads import torch_threads
from ..warmup.warmup import Imitator
from ..weights import files, lora
from . import checkpoint
from .batching import TrainRows, flat, minibatches, passes, row_passes, turn_rewards
from .memory import checkpoint_layers, peak_memory_mib
from .optimizer import adamw, clip_gradient, rate_factor, set_rate
from .settings import TrainerSettings
from .token_logps import TokenScorer

__all__ = ["TorchTrainer", "TrainerSettings"]

VALUE_WEIGHT = 0.5
"""Weight of the critic's loss. AdamW ignores the scale of a gradient, except where the gradient is clipped."""
MAX_NONFINITE_UPDATES = 3
"""Number of updates in a row without a finite gradient after which a run ends."""

_PER_LEARNED_TOKEN = ("entropy_nats", "approx_kl", "clip_share")
"""Metrics that are averaged over the tokens of all samples that are not skipped."""


class TorchTrainer:
    """Trains a causal language model; implements `envkit.protocols.Trainer`.

    `update`, `score`, `publish`, `copy_to`, `save` and `restore` wait for each other: none sees half an update.

    Args:
        model: The policy, on its device.
        algorithm: The learning algorithm, with its advantage function and loss.
        settings: Settings of the optimiser.
        folder: Folder for `publish`; None if the engine copies the weights within this process.
        engine_dtype: Number format of the engine's weights, for the file and the checksum of `publish`.
        critic: The critic; required for algorithms that have one.
        reference: Reference policy of the KL term; required if the KL coefficient is above 0.
        tokenizer: Tokenizer to save with the policy, so that a checkpoint is a complete model folder.
        publishes_adapter: Whether `publish` writes only the model's LoRA adapter; otherwise, all weights with the
            adapter added.
    """

    def __init__(
        self,
        model: Any,
        algorithm: Algorithm,
        settings: TrainerSettings,
        folder: Path | None,
        *,
        engine_dtype: str = "float32",
        critic: Critic | None = None,
        reference: Any = None,
        tokenizer: Any = None,
        publishes_adapter: bool = False,
    ) -> None:
        if algorithm.has_critic and critic is None:
            raise ValueError(f"{algorithm.advantage.name} needs a critic")
        if algorithm.kl_coefficient > 0 and reference is None:
            raise ValueError("a KL coefficient above 0 needs a reference")
        self._model = model
        self._tokenizer = tokenizer
        self._algorithm = algorithm
        self._advantages: Callable[[Rollouts, Algorithm], Advantages] = algorithm.advantage.load()
        self._loss: Callable[[Tokens, Algorithm], PolicyLoss] = algorithm.loss.load()
        self._engine_dtype: torch.dtype = getattr(torch, engine_dtype)
        self._settings = settings
        self._folder = folder
        self._publishes_adapter = publishes_adapter
        self._lock = anyio.Lock()
        self._begin(critic, reference)

    def begin(self) -> None:
        """Start over from the present weights, for example after imitation: with a new optimiser, critic, reference."""
        self._begin(*critic_and_reference(self._model, self._algorithm, seed=self._settings.seed))

    def _begin(self, critic: Critic | None, reference: Any) -> None:
        model, settings = self._model, self._settings
        self._critic = critic
        self._reference = reference
        self._samples: list[Sample] = []
        self._nonfinite = 0
        self.version = 0
        self._scorer = self._score_with(model)
        if settings.packing and not self._scorer.shares_rows:
            kind = type(model).__name__
            raise UsageError(f"trainer.packing: not supported by {kind}, which cannot separate samples; use false")
        self._reference_scorer = None if reference is None else self._score_with(reference)
        self._optimizer = adamw(
            model, settings.learning_rate, weight_decay=settings.weight_decay, is_fused=settings.is_large
        )
        self._critic_optimizer: torch.optim.AdamW | None = None
        if critic is not None:
            rate, decay = settings.critic_learning_rate, settings.weight_decay
            self._critic_optimizer = adamw(critic, rate, weight_decay=decay, is_fused=settings.is_large)
        if settings.gradient_checkpointing:
            for body in [model] if critic is None else [model, critic.body]:
                checkpoint_layers(body)

    @property
    def description(self) -> str:
        """What is trained, in one line, if the model has a LoRA adapter; otherwise empty."""
        return lora.description(self._model)

    @property
    def checkpoint_bytes(self) -> int:
        """Size of a checkpoint after the first update: the trained weights and two moments of each in the optimizer."""
        models = [self._model] if self._critic is None else [self._model, self._critic]
        return sum(12 * one.numel() for model in models for one in model.parameters() if one.requires_grad)

    def imitator(self, stop: Stop) -> Imitator:
        """Return an imitator, which trains the same weights on demonstrations; call `begin` after it has finished.

        Args:
            stop: Reports to the user that the run waits for the current update, after a stop was requested.
        """
        settings = self._settings
        return Imitator(
            self._model,
            max_grad_norm=settings.max_grad_norm,
            micro_tokens=settings.micro_tokens,
            threads=settings.threads,
            stop=stop,
            is_pretrained=settings.is_large,
            precision=settings.precision,
            packing=settings.packing,
        )

    async def accumulate(self, samples: Sequence[Sample]) -> None:
        """See `envkit.protocols.Trainer.accumulate`."""
        self._samples += samples

    async def update(self) -> dict[str, float]:
        """Update the policy from the accumulated samples, then discard the samples.

        Returns:
            learning_rate, policy_loss, entropy_nats, approx_kl (k3 estimate relative to the old log-probabilities),
            sampler_gap_nats (mean absolute difference between the log-probabilities of engine and trainer for the same
            weights, in the first update), samples (number of samples), updates (number of optimiser updates of the
            policy), skipped_updates (updates left out because the gradient is 0: the policy and its optimiser stay as
            they are), nonfinite_updates (updates left out because a gradient is not finite), clip_share,
            grad_norm, advantage_abs, and value_loss with a critic. They are means over the tokens (for the critic,
            turns) of all updates with finite gradients. With `is_large`, there are also skipped_samples (samples whose
            advantages are 0), learned_tokens (tokens of all other samples, over which entropy_nats, approx_kl and
            clip_share are averaged) and peak_memory_mib (see `peak_memory_mib`).

        Raises:
            UsageError: `MAX_NONFINITE_UPDATES` updates in a row had gradients that are not finite.
        """
        async with self._lock:
            samples, self._samples = self._samples, []
            return await clock.to_thread(self._update, samples)

    async def score(self, samples: Sequence[Sample]) -> list[Floats]:
        """See `envkit.protocols.Trainer.score`."""
        async with self._lock:
            return await clock.to_thread(self._logps, self._scorer, samples)

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

    def _update(self, samples: Sequence[Sample]) -> dict[str, float]:
        if not samples:
            raise ValueError("update() without samples; call accumulate() first")
        settings = self._settings
        sums = defaultdict[str, float](float)
        factor = rate_factor(
            settings.schedule, self.version, steps=settings.steps, warmup_steps=settings.schedule_warmup_steps
        )
        set_rate(self._optimizer, settings.learning_rate * factor)
        if self._critic_optimizer is not None:
            set_rate(self._critic_optimizer, settings.critic_learning_rate * factor)
        with torch_threads(settings.threads):
            rows = self._prepare(samples)
            for indices in minibatches(
                [sample.group for sample in samples],
                self._algorithm.minibatches,
                self._algorithm.epochs,
                seed=settings.seed * 1_000_003 + self.version,
                keeps_groups=settings.is_large,
            ):
                self._learn(rows, indices, sums)
                if not sums["first_tokens"]:  # an update without advantages computes no log-probabilities
                    sums["first_tokens"] = sums["learned_tokens"]
                    sums["first_gap"] = sums["sampler_gap"]
        self.version += 1
        counts = {key: sums.pop(key, 0.0) for key in ("updates", "skipped_updates", "nonfinite_updates")}
        tokens, turns = max(sums.pop("tokens", 0.0), 1.0), max(sums.pop("turns", 0.0), 1.0)
        learned, skipped = sums.pop("learned_tokens", 0.0), sums.pop("skipped_samples", 0.0)
        grad_norm = sums.pop("grad_norm", 0.0) / max(counts["updates"] + counts["skipped_updates"], 1.0)
        gap = sums.pop("first_gap") / max(sums.pop("first_tokens"), 1.0)
        sums.pop("sampler_gap", None)
        count = {**dict.fromkeys(_PER_LEARNED_TOKEN, max(learned, 1.0)), "value_loss": turns}
        report = {key: value / count.get(key, tokens) for key, value in sums.items()}
        report |= {"samples": float(len(samples)), **counts}
        report |= {"grad_norm": grad_norm, "sampler_gap_nats": gap, "learning_rate": settings.learning_rate * factor}
        if settings.is_large:
            report |= {"learned_tokens": learned, "skipped_samples": skipped}
            report["peak_memory_mib"] = peak_memory_mib(self._model.device)
        return report

    def _publish(self) -> Weights:
        model, dtype = self._model, self._engine_dtype
        if self._folder is not None and self._publishes_adapter:
            path = self._folder / f"version-{self.version}"
            with writing(path):
                lora.save_adapter(model, path)
            checksum = files.checksum_of(lora.adapter_weights(model).values(), dtype)
            return Weights(self.version, str(path), checksum, adapter=True)
        checksum = files.checksum(model, dtype)
        if self._folder is None:
            return Weights(self.version, "", checksum)
        path = self._folder / f"version-{self.version}.safetensors"
        with writing(path):
            self._folder.mkdir(parents=True, exist_ok=True)
            path = files.save_weights(model, path, dtype, shard_bytes=self._settings.shard_mib << 20)
        return Weights(self.version, str(path), checksum)

    def _save(self, folder: Path) -> None:
        models = checkpoint.Models(self._model, self._tokenizer, self._reference)
        checkpoint.save(folder, models, self._stateful(), self.version, shard_bytes=self._settings.shard_mib << 20)

    def _restore(self, folder: Path) -> None:
        models = checkpoint.Models(self._model, self._tokenizer, self._reference)
        self.version = checkpoint.restore(folder, models, self._stateful())

    def _stateful(self) -> dict[str, checkpoint.Stateful]:
        parts: dict[str, checkpoint.Stateful] = {"policy_optimizer": self._optimizer}
        if self._critic is not None and self._critic_optimizer is not None:
            parts |= {"critic": checkpoint.TrainedWeights(self._critic), "critic_optimizer": self._critic_optimizer}
        return parts

    def _score_with(self, model: Any) -> TokenScorer:
        settings = self._settings
        return TokenScorer(
            model, temperature=settings.temperature, precision=settings.precision, in_blocks=settings.is_large
        )

    def _prepare(self, samples: Sequence[Sample]) -> TrainRows:
        """Compute advantages, critic targets and reference log-probabilities once per train step."""
        algorithm = self._algorithm
        first: dict[str, Sample] = {}
        for sample in samples:
            first.setdefault(sample.episode, sample)
        episodes = list(first.values())
        place = {episode: number for number, episode in enumerate(first)}
        number = [place[sample.episode] for sample in samples]
        reward_ET, turn_mask_ET = turn_rewards(episodes)
        value_KET = torch.zeros(int(algorithm.has_critic), *reward_ET.shape)
        if algorithm.has_critic:
            self._estimate(samples, number, value_KET[0])
        groups = [episode.group for episode in episodes]
        made = self._advantages(Rollouts(reward_ET, turn_mask_ET, value_KET, groups, samples, number), algorithm)
        ends = np.cumsum([sample.num_policy_tokens for sample in samples])[:-1]
        sampled = [sample.logprobs[sample.mask] for sample in samples]
        return TrainRows(
            samples,
            np.split(made.advantage_N.numpy(), ends),
            self._logps(self._scorer, samples) if algorithm.old_logprobs == "recomputed" else sampled,
            [] if made.target_BT is None else [made.target_BT[row].numpy() for row in number],
            self._logps(self._reference_scorer, samples) if algorithm.kl_coefficient > 0 else [],
        )

    def _learn(self, rows: TrainRows, indices: Sequence[int], sums: defaultdict[str, float]) -> None:
        """Make one optimiser update from the samples at `indices`, and add the metrics of the update to `sums`.

        An update whose gradients are not finite changes nothing, and only its number is added.
        """
        own = defaultdict[str, float](float, policy_loss=0.0, advantage_abs=0.0)  # also if every sample is skipped
        tokens = sum(rows.samples[row].num_policy_tokens for row in indices)
        turns = sum(len(policy_turns(rows.samples[row])) for row in indices)
        self._optimizer.zero_grad()
        skips = self._settings.is_large
        learned = [row for row in indices if not skips or self._has_gradient(rows, row)]
        for part in self._passes(rows.samples, learned):
            loss = self._policy_pass(rows, part, own) / tokens
            loss.backward()  # type: ignore[no-untyped-call]
        if self._critic is not None and self._critic_optimizer is not None:
            self._critic_optimizer.zero_grad()
            for chosen in self._plain_passes(rows.samples, indices):
                value_loss = self._critic_pass(rows, chosen, own) * VALUE_WEIGHT / turns
                value_loss.backward()  # type: ignore[no-untyped-call]
        bound, train_step = self._settings.max_grad_norm, self.version + 1
        try:  # change nothing before both gradients were found to be finite
            norm = clip_gradient(self._model, bound, train_step=train_step)
            if self._critic is not None:
                clip_gradient(self._critic, bound, train_step=train_step, key="trainer.critic_learning_rate")
        except UsageError:
            self._nonfinite += 1
            if self._nonfinite >= MAX_NONFINITE_UPDATES:
                raise
            sums["nonfinite_updates"] += 1
            return
        if self._critic_optimizer is not None:
            self._critic_optimizer.step()
        if norm > 0:
            self._optimizer.step()
            self._nonfinite = 0
            own["updates"] = 1.0
        else:  # momentum and weight decay would move the weights although there is nothing to learn
            own["skipped_updates"] = 1.0
        own["tokens"], own["turns"], own["grad_norm"] = tokens, turns, norm
        own["learned_tokens"] = sum(rows.samples[row].num_policy_tokens for row in learned)
        own["skipped_samples"] = len(indices) - len(learned)
        for key, value in own.items():
            sums[key] += value

    def _has_gradient(self, rows: TrainRows, row: int) -> bool:
        """Return whether the sample at index `row` may have a gradient."""
        algorithm = self._algorithm
        if algorithm.entropy_coefficient > 0 or algorithm.kl_coefficient > 0:
            return True
        return bool(rows.advantages[row].any())

    def _passes(self, samples: Sequence[Sample], indices: Sequence[int]) -> Iterator[list[list[int]]]:
        """Split samples into passes of rows. A row is a list of sample indices."""
        settings = self._settings
        chosen = [samples[row] for row in indices]
        shares_rows = self._scorer.shares_rows
        for part in row_passes(chosen, settings.micro_tokens, shares_rows=shares_rows, packs=settings.packing):
            yield [[indices[place] for place in row] for row in part]

    def _plain_passes(self, samples: Sequence[Sample], indices: Sequence[int]) -> Iterator[list[int]]:
        for part in passes([samples[row] for row in indices], self._settings.micro_tokens):
            yield [indices[place] for place in part]

    def _policy_pass(self, rows: TrainRows, part: Sequence[Sequence[int]], sums: defaultdict[str, float]) -> Tensor:
        """Return the summed loss of all tokens of `part`, a list of rows of sample indices; add metrics to `sums`."""
        algorithm, device = self._algorithm, self._model.device
        chosen = [number for row in part for number in row]
        samples = [rows.samples[number] for number in chosen]
        scored = self._scorer.score(
            [[rows.samples[number] for number in row] for row in part],
            entropy_has_gradient=algorithm.entropy_coefficient > 0,
        )
        logp_N, entropy_N = scored
        old_N = flat([rows.old[row] for row in chosen], device)
        sampled_N = flat([sample.logprobs[sample.mask] for sample in samples], device)
        advantage_N = flat([rows.advantages[row] for row in chosen], device)
        policy = self._loss(Tokens(logp_N, old_N, sampled_N, advantage_N), algorithm)
        total = policy.loss_N.sum() - algorithm.entropy_coefficient * entropy_N.sum()
        if algorithm.kl_coefficient > 0:
            reference_N = flat([rows.reference[row] for row in chosen], device)
            kl_N = losses.kl_estimate(logp_N, reference_N)
            total = total + algorithm.kl_coefficient * kl_N.sum()
            sums["reference_kl"] += float(kl_N.detach().sum())
        sums["policy_loss"] += float(policy.loss_N.detach().sum())
        sums["entropy_nats"] += float(entropy_N.detach().sum())
        sums["approx_kl"] += float(losses.kl_estimate(old_N, logp_N.detach()).sum())
        sums["sampler_gap"] += float((logp_N.detach() - sampled_N).abs().sum())
        sums["clip_share"] += float(policy.clipped_N.sum())
        sums["advantage_abs"] += float(advantage_N.abs().sum())
        return total

    def _critic_pass(self, rows: TrainRows, chosen: Sequence[int], sums: defaultdict[str, float]) -> Tensor:
        assert self._critic is not None
        samples = [rows.samples[row] for row in chosen]
        with self._scorer.autocast():
            value_N = self._critic(samples)
        target = [rows.targets[row][policy_turns(rows.samples[row])] for row in chosen]
        loss = losses.value_loss(value_N, flat(target, value_N.device)).sum()
        sums["value_loss"] += float(loss.detach())
        return loss

    @torch.no_grad()
    def _estimate(self, samples: Sequence[Sample], episodes: Sequence[int], value_ET: Tensor) -> None:
        """Write the critic's estimates for the start of each turn to `value_ET`; `episodes` has each sample's row."""
        assert self._critic is not None
        for part in passes(samples, self._settings.micro_tokens):
            with self._scorer.autocast():
                values = iter(self._critic([samples[row] for row in part]).tolist())
            for row in part:
                for turn in policy_turns(samples[row]):
                    value_ET[episodes[row], turn] = next(values)

    @torch.no_grad()
    def _logps(self, scorer: TokenScorer | None, samples: Sequence[Sample]) -> list[Floats]:
        """Return the log-probabilities of each sample's policy tokens."""
        assert scorer is not None
        found: dict[int, Floats] = {}
        with torch_threads(self._settings.threads):
            for part in self._passes(samples, range(len(samples))):
                scored = scorer.score([[samples[number] for number in row] for row in part])
                chosen = [number for row in part for number in row]
                ends = np.cumsum([samples[number].num_policy_tokens for number in chosen])[:-1]
                found |= zip(chosen, np.split(scored.logp_N.float().cpu().numpy(), ends), strict=True)
        return [floats(found[number]) for number in range(len(samples))]
