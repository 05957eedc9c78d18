"""The learner: modules, their optimisers, and the passes that compute log-probabilities and gradients.

There is one learner per process. It does not know where advantages and weights come from: that is the trainer's plan.
"""

from __future__ import annotations

import math
import resource
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from envkit.errors import UsageError
from envkit.types import Floats, Sample, floats

from ..algorithms import terms
from ..algorithms.algorithm import Algorithm
from ..algorithms.critic import Critic
from ..algorithms.parts import PolicyLoss, Tokens
from . import checkpoint
from .batching import TrainRows, flat, passes, row_passes
from .token_logps import TokenScorer

Sums: TypeAlias = defaultdict[str, float]
VALUE_WEIGHT = 0.5
"""Weight of the critics' loss. AdamW ignores the scale of a gradient, except where the gradient is clipped."""


@dataclass(frozen=True, slots=True)
class TrainerSettings:
    """Settings of the optimisers and of the passes over the samples.

    They have the units and values of the keys of the sections `trainer`, `imitation` and `rollout` of a training file.

    Attributes:
        seed: Seed for shuffling the minibatches.
        temperature: Temperature at which the samples were drawn, and their log-probabilities are computed.
        threads: Number of torch threads for learning; 0 leaves torch's number of threads unchanged.
        steps: Number of train steps in the run; the schedule decays over these steps.
        imitation_rate: Learning rate of a phase of imitation; it decays along a cosine to 0.
        imitates_with_muon: Whether Muon trains the layers' matrices in a phase of imitation; see `muon`.
    """

    learning_rate: float
    critic_learning_rate: float
    max_grad_norm: float
    micro_tokens: int
    seed: int
    temperature: float = 1.0
    threads: int = 0
    schedule: str = "constant"
    schedule_warmup_steps: int = 0
    steps: int = 0
    weight_decay: float = 0.0
    precision: str = "float32"
    gradient_checkpointing: bool = False
    packing: bool = False
    shard_mib: int = 4096
    imitation_rate: float = 0.0
    imitates_with_muon: bool = False


class Learner:
    """What learns in one phase of a run.

    `imitates` says whether the phase imitates: at temperature 1, without weight decay, and perhaps with Muon.
    """

    def __init__(
        self,
        model: Any,
        algorithm: Algorithm,
        settings: TrainerSettings,
        *,
        critics: Sequence[Critic] = (),
        reference: Any = None,
        imitates: bool = False,
    ) -> None:
        self.model, self.critics, self.reference = model, critics, reference
        self._algorithm, self._settings = algorithm, settings
        self._rate_key = "imitation.learning_rate" if imitates else "trainer.learning_rate"
        temperature = 1.0 if imitates else settings.temperature
        scorer = partial(TokenScorer, temperature=temperature, precision=settings.precision)
        self.scorer = scorer(model)
        self._reference_scorer = None if reference is None else scorer(reference)
        if settings.packing and not self.scorer.shares_rows:
            kind = type(model).__name__
            raise UsageError(f"trainer.packing: not supported by {kind}, which cannot separate samples; use false")
        decay = settings.weight_decay
        self._optimizers = (
            muon(model, 0.0)
            if imitates and settings.imitates_with_muon
            else adamw(model, 0.0, weight_decay=0.0 if imitates else decay)
        )
        self._critic_optimizers = [one for critic in critics for one in adamw(critic, 0.0, weight_decay=decay)]
        if settings.gradient_checkpointing:
            for body in (model, *(critic.body for critic in critics)):
                checkpoint_layers(body)

    def state(self) -> dict[str, checkpoint.Stateful]:
        """Return what a checkpoint has beside the weights of policy and reference."""
        names = [f"policy_optimizer{f'.{number}' if number else ''}" for number in range(len(self._optimizers))]
        parts: dict[str, checkpoint.Stateful] = dict(zip(names, self._optimizers, strict=True))
        for number, (critic, optimizer) in enumerate(zip(self.critics, self._critic_optimizers, strict=True)):
            suffix = f".{number}" if number else ""
            parts |= {f"critic{suffix}": checkpoint.TrainedWeights(critic), f"critic_optimizer{suffix}": optimizer}
        return parts

    @torch.no_grad()
    def score(self, samples: Sequence[Sample], *, of_reference: bool = False) -> tuple[list[Floats], list[Floats]]:
        """Return the log-probabilities of each sample's policy tokens, and the entropies of their distributions.

        They are those of the policy, or of the reference policy.
        """
        scorer = self._reference_scorer if of_reference else self.scorer
        assert scorer is not None, "the algorithm needs no reference"
        logps: dict[int, Floats] = {}
        entropies: dict[int, Floats] = {}
        for part in self._passes(samples, range(len(samples))):
            scored = scorer.score([[samples[number] for number in row] for row in part])
            chosen = [number for row in part for number in row]
            ends = np.cumsum([samples[number].num_policy_tokens for number in chosen])[:-1]
            for found, value_N in ((logps, scored.logp_N), (entropies, scored.entropy_N)):
                found |= zip(chosen, np.split(value_N.float().cpu().numpy(), ends), strict=True)
        numbers = range(len(samples))
        return [floats(logps[number]) for number in numbers], [floats(entropies[number]) for number in numbers]

    @torch.no_grad()
    def values(self, samples: Sequence[Sample]) -> list[Tensor]:
        """Return the estimates of the K critics for each sample [K, n + 1]: of n turns or tokens, and after them."""
        found: dict[int, Tensor] = {}
        for part in passes(samples, self._settings.micro_tokens):
            chosen = [samples[row] for row in part]
            with self.scorer.autocast():
                value_KN = torch.stack([critic(chosen, ends=True) for critic in self.critics]).cpu()
            sizes = [self.critics[0].estimates(sample) + 1 for sample in chosen]
            found |= zip(part, torch.split(value_KN, sizes, dim=1), strict=True)
        return [found[number] for number in range(len(samples))]

    def learn(self, rows: TrainRows, indices: Sequence[int], weights: Mapping[int, Floats]) -> Mapping[str, float]:
        """Compute the policy's gradient for the samples at `indices`; return sums over their tokens.

        `weights` are those of the loss of each policy token, by sample.
        """
        sums: Sums = defaultdict(float)
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        together = rows.rollouts if "whole_rollouts" in self._algorithm.needs else None
        for part in self._passes(rows.samples, indices, together):
            self._pass(rows, part, weights, sums).backward()  # type: ignore[no-untyped-call]
        return sums

    def learn_values(self, rows: TrainRows, indices: Sequence[int]) -> Mapping[str, float]:
        """Compute the critics' gradients for the samples at `indices`; return the sum and number of the errors."""
        sums: Sums = defaultdict(float)
        clip = self._algorithm.section.value_clip
        for number, critic in enumerate(self.critics):
            critic.zero_grad()
            known = sum(int((~rows.targets[row][number].isnan()).sum()) for row in indices)
            sums["values"] += known
            for places in passes([rows.samples[row] for row in indices], self._settings.micro_tokens):
                chosen = [indices[place] for place in places]
                with self.scorer.autocast():
                    value_N = critic([rows.samples[row] for row in chosen])
                target_N, before_N = (
                    torch.cat([of[row][number] for row in chosen]).to(value_N) for of in (rows.targets, rows.values)
                )
                loss = terms.value_loss(value_N, target_N, before_N, clip).sum()
                (loss * VALUE_WEIGHT / max(known, 1)).backward()  # type: ignore[no-untyped-call]
                sums["value_loss"] += float(loss.detach())
        return sums

    def step(self, rate: float, critic_rate: float, *, number: int) -> float:
        """Clip the gradients, update policy and critics, and return the norm of the policy's gradient.

        With a norm of 0, the policy is not updated: momentum and weight decay would move the weights although there is
        nothing to learn.

        Raises:
            UsageError: A gradient is not finite; nothing was changed.
        """
        bound = self._settings.max_grad_norm
        norm = clip_gradient(self.model, bound, number=number, key=self._rate_key)
        for critic in self.critics:
            clip_gradient(critic, bound, number=number, key="trainer.critic_learning_rate")
        set_rate(self._optimizers, rate)
        set_rate(self._critic_optimizers, critic_rate)
        for optimizer in [*(self._optimizers if norm > 0 else ()), *self._critic_optimizers]:
            optimizer.step()
        return norm

    def _pass(
        self, rows: TrainRows, part: Sequence[Sequence[int]], weights: Mapping[int, Floats], sums: Sums
    ) -> Tensor:
        """Return the weighted loss of the rows of sample indices in `part`, and add to `sums`."""
        algorithm, device = self._algorithm, self.model.device
        chosen = [number for row in part for number in row]
        logp_N, entropy_N = self.scorer.score(
            [[rows.samples[number] for number in row] for row in part],
            entropy_has_gradient=algorithm.has_entropy_gradient,
        )

        def of(values: Sequence[Floats] | Mapping[int, Floats]) -> Tensor:
            return flat([values[number] for number in chosen], device)

        sampled_N = flat([rows.samples[number].logprobs[rows.samples[number].mask] for number in chosen], device)
        old_N, advantage_N = of(rows.old), of(rows.advantages)
        reference_N = of(rows.reference) if rows.reference else None
        segments = rows.segments(chosen, device)
        prepared_N = of(rows.prepared) if rows.prepared else None
        tokens = Tokens(logp_N, old_N, sampled_N, reference_N, entropy_N, advantage_N, segments, prepared_N)
        policy: PolicyLoss = algorithm.loss(tokens)
        loss_N = policy.loss_N * of(rows.factors) if rows.factors else policy.loss_N
        bonus_N = entropy_N * of(rows.entropy_weights) if rows.entropy_weights else entropy_N
        total_N = loss_N - algorithm.section.entropy_coefficient * bonus_N
        if rows.kl_coefficient > 0:
            kl_N = terms.kl_loss(tokens, algorithm.section.kl.estimator)
            total_N = total_N + rows.kl_coefficient * kl_N
            sums["reference_kl"] += float(kl_N.detach().sum())
        if rows.factors:
            sums["correction_factor"] += float(of(rows.factors).sum())
        versions = [rows.samples[number].versions[rows.samples[number].mask] for number in chosen]
        is_current_N = flat(versions, device) == rows.version
        found = {
            "policy_loss": loss_N,
            "entropy_nats": entropy_N,
            "approx_kl": terms.kl_estimate(old_N, logp_N),
            "sampler_gap": (logp_N - sampled_N).abs() * is_current_N,
            "current_tokens": is_current_N,
            "advantage_abs": advantage_N.abs(),
            **policy.metrics,
        }
        for name, value_N in found.items():
            sums[name] += float(value_N.detach().sum())
        return (total_N * of(weights)).sum()

    def _passes(
        self, samples: Sequence[Sample], indices: Sequence[int], together: Sequence[int] | None = None
    ) -> Iterator[list[list[int]]]:
        """Split samples into passes of rows. A row is a list of sample indices."""
        settings = self._settings
        for part in row_passes(
            [samples[row] for row in indices],
            settings.micro_tokens,
            shares_rows=self.scorer.shares_rows,
            packs=settings.packing,
            together=None if together is None else [together[row] for row in indices],
        ):
            yield [[indices[place] for place in row] for row in part]


def checkpoint_layers(model: nn.Module) -> None:
    """Make each layer recompute its activations in the backward pass; dropout remains off.

    Raises:
        UsageError: The model does not support gradient checkpointing, or a layer has dropout, which gradient
            checkpointing would turn on.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        kind = type(model).__name__
        raise UsageError(f"trainer.gradient_checkpointing: not supported by {kind}; set this key to false")
    if any(isinstance(rate := getattr(layer, "dropout", 0.0), float) and rate > 0 for layer in layers):
        raise UsageError("trainer.gradient_checkpointing: not supported by layers with dropout; set this key to false")
    for layer in layers:
        layer.gradient_checkpointing = True
        recompute: Any = partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
        layer._gradient_checkpointing_func = recompute
        # Checkpointing requires the layer's training flag. The layer's submodules remain in evaluation mode.
        layer.training = True


def peak_memory_mib(device: torch.device) -> float:
    """Return this process's peak memory in MiB: on a CPU, all its resident memory; on a GPU, its allocated tensors."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def adamw(module: nn.Module, learning_rate: float, *, weight_decay: float = 0.0) -> list[torch.optim.Optimizer]:
    """Return an AdamW optimiser whose betas suit short runs. Vectors (gains of norms, biases) have no weight decay."""
    weights = [weight for weight in module.parameters() if weight.requires_grad]
    groups: list[dict[str, Any]] = [{"params": weights}]
    if weight_decay:
        groups = [{"params": [weight for weight in weights if weight.ndim > 1]}]
        groups += [{"params": [weight for weight in weights if weight.ndim < 2], "weight_decay": 0.0}]
    # The fused kernel needs no temporary copies of the weights.
    return [torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), weight_decay=weight_decay, fused=True)]


def muon(model: Any, learning_rate: float) -> list[torch.optim.Optimizer]:
    """Return Muon for the layers' matrices and AdamW for all other weights.

    With Muon, a policy with random initial weights needs far fewer updates to play frozen lake (`docs/imitation.md`).
    """
    embeddings = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
    inner = [weight for weight in model.parameters() if weight.ndim == 2 and id(weight) not in embeddings]
    outer = [weight for weight in model.parameters() if weight.ndim != 2 or id(weight) in embeddings]
    return [
        torch.optim.Muon(inner, lr=learning_rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(outer, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def rate_factor(schedule: str, step: int, *, steps: int, warmup_steps: int) -> float:
    """Return the factor by which the schedule scales the learning rate in a train step.

    Args:
        schedule: ``"constant"``, or ``"linear"`` or ``"cosine"``, which decay to 0 at the end of the run.
        step: Number of the train step, from 0.
        steps: Train steps of the run.
        warmup_steps: Number of train steps at the start over which the rate rises; the last of them has the full rate.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if schedule == "constant":
        return 1.0
    share = min((step - warmup_steps) / max(steps - warmup_steps, 1), 1.0)
    return 1.0 - share if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * share))


def clip_gradient(module: nn.Module, max_norm: float, *, number: int, key: str) -> float:
    """Clip the norm of the gradient and return the norm before clipping.

    Raises:
        UsageError: The gradient is not finite, so an update would make every weight NaN. The error names the `number`
            of the update, and its advice is to lower the setting `key`.
    """
    try:
        return float(nn.utils.clip_grad_norm_(module.parameters(), max_norm, error_if_nonfinite=True))
    except RuntimeError as error:
        if "non-finite" not in str(error):  # library's message: torch
            raise
        raise UsageError(
            f"the gradient of {'update' if key.startswith('imitation') else 'train step'} {number} is not finite; "
            f"lower {key} and continue from the last checkpoint with --resume"
        ) from None


def set_rate(optimizers: Sequence[torch.optim.Optimizer], learning_rate: float) -> None:
    """Set the learning rate of all following updates."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
