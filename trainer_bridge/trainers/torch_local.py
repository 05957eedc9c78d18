"""The trainer for one process and one device. Axes: B samples, L tokens, T turns, N tokens that carry loss.

One train step is: advantages of all samples, then `epochs` times `minibatches` optimiser updates, each summed over
passes of at most `micro_tokens` tokens. The samples' own log-probabilities are the old ones, so a ratio is measured
against what was really sampled from.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from textwrap import shorten
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from envkit.errors import UsageError
from envkit.types import Sample, Weights

from ..algorithms import advantages, losses
from ..algorithms.advantages import Batch
from ..algorithms.catalogue import Algorithm
from ..algorithms.critic import Critic
from ..run_folder.writing import share_weights, writing
from ..threads import torch_threads

UNREADABLE = (OSError, EOFError, KeyError, RuntimeError, TypeError, ValueError, SafetensorError, UnpicklingError)
"""What reading a file of a checkpoint raises when it is not there, cut off, or another one."""


@dataclass(frozen=True, slots=True)
class TrainerSettings:
    """How the optimiser moves.

    Attributes:
        learning_rate: AdamW's step size for the policy.
        critic_learning_rate: The same for the critic.
        max_grad_norm: Bound on the gradient's norm.
        micro_tokens: Bound on the tokens of one pass, padding included.
        seed: Order of the minibatches.
        temperature: What the samples were drawn at; every distribution is taken at the same one.
        threads: Threads of torch that learn; 0 leaves their number as it is.
    """

    learning_rate: float
    critic_learning_rate: float
    max_grad_norm: float
    micro_tokens: int
    seed: int
    temperature: float = 1.0
    threads: int = 0


@dataclass(frozen=True, slots=True)
class _Rows:
    """Samples with all that a loss needs, before they are padded."""

    samples: Sequence[Sample]
    advantages: Sequence[Sequence[float]]
    returns: Sequence[Sequence[float]]
    reference: Sequence[Sequence[float]]


class TorchTrainer:
    """Trains a causal language model; satisfies `envkit.protocols.Trainer`.

    Args:
        model: The policy, on its device.
        algorithm: How samples become a gradient.
        settings: How the optimiser moves.
        folder: Where `publish` writes.
        critic: Estimates the return of a turn; needed by algorithms that have one.
        reference: The policy that the KL is measured to; needed where its coefficient is above 0.
        tokenizer: Is saved beside the policy, so that a checkpoint is a whole model folder.
    """

    def __init__(
        self,
        model: Any,
        algorithm: Algorithm,
        settings: TrainerSettings,
        folder: Path,
        *,
        critic: Critic | None = None,
        reference: Any = None,
        tokenizer: Any = None,
    ) -> None:
        if algorithm.has_critic and critic is None:
            raise ValueError(f"{algorithm.advantage} needs a critic")
        if algorithm.kl_coefficient > 0 and reference is None:
            raise ValueError("a KL coefficient above 0 needs a reference")
        self._model = model
        self._critic = critic
        self._reference = reference
        self._tokenizer = tokenizer
        self._algorithm = algorithm
        self._settings = settings
        self._folder = folder
        self._samples: list[Sample] = []
        self.version = 0
        self._optimizer = adamw(model, settings.learning_rate)
        self._critic_optimizer = None if critic is None else adamw(critic, settings.critic_learning_rate)

    def accumulate(self, samples: Sequence[Sample]) -> None:
        """See `envkit.protocols.Trainer.accumulate`."""
        self._samples += samples

    def update(self) -> dict[str, float]:
        """Learn from what was accumulated and drop it.

        Returns:
            policy_loss, entropy_nats, approx_kl (k3 against the sampling policy), clip_share, grad_norm,
            advantage_abs, and with a critic value_loss; means over tokens (turns for the critic) of all updates.

        Raises:
            UsageError: A gradient is not finite; the weights stay as they were before it.
        """
        samples, self._samples = self._samples, []
        if not samples:
            raise ValueError("nothing was accumulated")
        sums: defaultdict[str, float] = defaultdict(float)
        updates = 0
        with torch_threads(self._settings.threads):
            rows = self._prepare(samples)
            for indices in self._minibatches(len(samples)):
                self._learn(rows, indices, sums)
                updates += 1
        self.version += 1
        tokens, turns = max(sums.pop("tokens"), 1.0), max(sums.pop("turns"), 1.0)
        grad_norm = sums.pop("grad_norm") / updates
        report = {key: value / (turns if key == "value_loss" else tokens) for key, value in sums.items()}
        return {**report, "grad_norm": grad_norm}

    def publish(self) -> Weights:
        """See `envkit.protocols.Trainer.publish`; older published weights are removed.

        Raises:
            UsageError: The disk is full or the folder cannot be written.
        """
        path = self._folder / f"version-{self.version}.safetensors"
        with writing(path):
            self._folder.mkdir(parents=True, exist_ok=True)
            safetensors.torch.save_model(self._model, str(path))
        share_weights(self._folder)
        for old in self._folder.glob("version-*.safetensors"):
            if old != path:
                old.unlink()
        return Weights(self.version, str(path))

    def save(self, folder: str) -> None:
        """See `envkit.protocols.Trainer.save`. The policy goes into ``policy/`` as an ordinary model folder."""
        self._model.save_pretrained(Path(folder) / "policy")
        if self._tokenizer is not None:
            self._tokenizer.save_pretrained(Path(folder) / "policy")
        state = {"policy_optimizer": self._optimizer.state_dict()}
        if self._critic is not None and self._critic_optimizer is not None:
            state["critic"] = self._critic.state_dict()
            state["critic_optimizer"] = self._critic_optimizer.state_dict()
        with (Path(folder) / "optimizer.pt").open("wb") as file:  # given a path, torch hides what the system said
            torch.save(state, file)
        if self._reference is not None:
            safetensors.torch.save_model(self._reference, str(Path(folder) / "reference.safetensors"))
        share_weights(Path(folder))
        (Path(folder) / "trainer.json").write_text(json.dumps({"version": self.version}))

    def restore(self, folder: str) -> None:
        """See `envkit.protocols.Trainer.restore`."""
        place = Path(folder)
        try:
            safetensors.torch.load_model(self._model, str(place / "policy" / "model.safetensors"))
            state = torch.load(place / "optimizer.pt", weights_only=True)
            self._optimizer.load_state_dict(state["policy_optimizer"])
            if self._critic is not None and self._critic_optimizer is not None:
                self._critic.load_state_dict(state["critic"])
                self._critic_optimizer.load_state_dict(state["critic_optimizer"])
            if self._reference is not None:
                safetensors.torch.load_model(self._reference, str(place / "reference.safetensors"))
            self.version = int(json.loads((place / "trainer.json").read_text())["version"])
        except UNREADABLE as error:
            raise UsageError(f"{place}: not a checkpoint of this policy and algorithm: {_reason(error)}") from error

    def _prepare(self, samples: Sequence[Sample]) -> _Rows:
        """Compute what stays fixed during all updates of the train step."""
        algorithm = self._algorithm
        reward_BT, turn_mask_BT = _turn_rewards(samples)
        value_BT = torch.zeros_like(reward_BT)
        if algorithm.has_critic:
            value_BT = self._values(samples, reward_BT.shape[1])
        batch = Batch(reward_BT, turn_mask_BT, value_BT, [sample.group for sample in samples])
        advantage_BT, return_BT = advantages.BY_NAME[algorithm.advantage](batch, algorithm)
        if algorithm.advantage_clip is not None:
            advantage_BT = advantage_BT.clamp(-algorithm.advantage_clip, algorithm.advantage_clip)
        reference = self._reference_logps(samples) if algorithm.kl_coefficient > 0 else [[] for _ in samples]
        return _Rows(samples, advantage_BT.tolist(), return_BT.tolist(), reference)

    def _minibatches(self, count: int) -> Iterator[list[int]]:
        """Yield the rows of each update; every pass sees every row once."""
        seed = self._settings.seed * 1_000_003 + self.version
        order = torch.Generator().manual_seed(seed % (1 << 63))  # torch takes no larger one
        parts = min(self._algorithm.minibatches, count)
        for _ in range(self._algorithm.epochs):
            shuffled = torch.randperm(count, generator=order)
            for part in shuffled.tensor_split(parts):
                yield sorted(part.tolist())

    def _learn(self, rows: _Rows, indices: Sequence[int], sums: defaultdict[str, float]) -> None:
        """Make one optimiser update from the rows at `indices`, adding what happened to `sums`."""
        tokens = sum(sum(rows.samples[row].mask) for row in indices)
        turns = sum(len(rows.samples[row].rewards) for row in indices)
        self._optimizer.zero_grad()
        if self._critic_optimizer is not None:
            self._critic_optimizer.zero_grad()
        for part in passes([rows.samples[row] for row in indices], self._settings.micro_tokens):
            chosen = [indices[position] for position in part]
            loss = self._policy_pass(rows, chosen, sums) / tokens
            loss.backward()  # type: ignore[no-untyped-call]
            if self._critic is not None:
                value_loss = self._critic_pass(rows, chosen, sums) * self._algorithm.value_coefficient / turns
                value_loss.backward()  # type: ignore[no-untyped-call]
        norm = self._bound_gradient(self._model)
        if self._critic is not None and self._critic_optimizer is not None:
            self._bound_gradient(self._critic, key="trainer.critic_learning_rate")
            self._critic_optimizer.step()
        self._optimizer.step()  # after both gradients were found to be numbers
        sums["tokens"] += tokens
        sums["turns"] += turns
        sums["grad_norm"] += norm

    def _bound_gradient(self, module: nn.Module, *, key: str = "trainer.learning_rate") -> float:
        """Scale the gradient down to the bound and return its norm before that.

        Raises:
            UsageError: It is not finite; one such update would make every weight NaN.
        """
        bound = self._settings.max_grad_norm
        try:
            return float(nn.utils.clip_grad_norm_(module.parameters(), bound, error_if_nonfinite=True))
        except RuntimeError as error:
            if "non-finite" not in str(error):  # library's message: torch
                raise
            raise UsageError(
                f"the gradient of train step {self.version + 1} is not finite; "
                f"lower {key} and continue from the last checkpoint with --resume"
            ) from None

    def _policy_pass(self, rows: _Rows, chosen: Sequence[int], sums: defaultdict[str, float]) -> Tensor:
        """Return the summed loss of the chosen rows' tokens."""
        algorithm, device = self._algorithm, self._model.device
        samples = [rows.samples[row] for row in chosen]
        logp_NV = token_logps(self._model, samples, temperature=self._settings.temperature)
        token_N = _flat([_said(sample, sample.token_ids) for sample in samples], device, torch.long)
        old_N = _flat([_said(sample, sample.logprobs) for sample in samples], device)
        share = [
            [rows.advantages[row][turn] for turn in _said(rows.samples[row], rows.samples[row].turn_ids)]
            for row in chosen
        ]
        advantage_N = _flat(share, device)
        logp_N = logp_NV.gather(1, token_N[:, None]).squeeze(1)
        policy = losses.BY_NAME[algorithm.loss](logp_N, old_N, advantage_N, algorithm)
        entropy_N = losses.entropy(logp_NV)
        total = policy.loss_N.sum() - algorithm.entropy_coefficient * entropy_N.sum()
        if algorithm.kl_coefficient > 0:
            reference_N = _flat([rows.reference[row] for row in chosen], device)
            kl_N = losses.kl_estimate(logp_N, reference_N)
            total = total + algorithm.kl_coefficient * kl_N.sum()
            sums["reference_kl"] += float(kl_N.detach().sum())
        sums["policy_loss"] += float(policy.loss_N.detach().sum())
        sums["entropy_nats"] += float(entropy_N.detach().sum())
        sums["approx_kl"] += float(losses.kl_estimate(old_N, logp_N.detach()).sum())
        sums["clip_share"] += float(policy.clipped_N.sum())
        sums["advantage_abs"] += float(advantage_N.abs().sum())
        return total

    def _critic_pass(self, rows: _Rows, chosen: Sequence[int], sums: defaultdict[str, float]) -> Tensor:
        assert self._critic is not None
        samples = [rows.samples[row] for row in chosen]
        value_N = self._critic(samples)
        return_N = _flat([rows.returns[row][: len(rows.samples[row].rewards)] for row in chosen], value_N.device)
        loss = losses.value_loss(value_N, return_N).sum()
        sums["value_loss"] += float(loss.detach())
        return loss

    @torch.no_grad()
    def _values(self, samples: Sequence[Sample], turns: int) -> Tensor:
        """Return the critic's estimate at the start of every turn [B, T]."""
        assert self._critic is not None
        value_BT = torch.zeros(len(samples), turns)
        for part in passes(samples, self._settings.micro_tokens):
            values = self._critic([samples[row] for row in part]).cpu()
            counts = [len(samples[row].rewards) for row in part]
            for row, value_T in zip(part, torch.split(values, counts), strict=True):
                value_BT[row, : len(value_T)] = value_T
        return value_BT

    @torch.no_grad()
    def _reference_logps(self, samples: Sequence[Sample]) -> list[list[float]]:
        found: list[list[float]] = [[] for _ in samples]
        for part in passes(samples, self._settings.micro_tokens):
            chosen = [samples[row] for row in part]
            logp_NV = token_logps(self._reference, chosen, temperature=self._settings.temperature)
            said = [_said(sample, sample.token_ids) for sample in chosen]
            token_N = _flat(said, logp_NV.device, torch.long)
            logp_N = logp_NV.gather(1, token_N[:, None]).squeeze(1).cpu()
            for row, logps in zip(part, torch.split(logp_N, [len(ids) for ids in said]), strict=True):
                found[row] = logps.tolist()
        return found


def _reason(error: Exception) -> str:
    """Return in one line why a checkpoint cannot be read."""
    if isinstance(error, (EOFError, UnpicklingError)):
        return "optimizer.pt is damaged"
    if isinstance(error, KeyError):
        return f"it holds no {error.args[0]}"
    # What torch says about weights that do not fit is a headline and then a line for each of them.
    return shorten(" ".join(str(error).splitlines()[:2]), 300) or type(error).__name__


def adamw(module: nn.Module, learning_rate: float) -> torch.optim.AdamW:
    """AdamW without weight decay, with the betas that suit short runs."""
    return torch.optim.AdamW(module.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)


def passes(samples: Sequence[Sample], micro_tokens: int) -> list[list[int]]:
    """Cut samples into passes of similar length, at most `micro_tokens` tokens each with padding (at least one row)."""
    order = sorted(range(len(samples)), key=lambda row: (len(samples[row].token_ids), row))
    parts: list[list[int]] = []
    for row in order:
        length = len(samples[row].token_ids)  # the longest so far
        if not parts or (len(parts[-1]) + 1) * length > micro_tokens:
            parts.append([])
        parts[-1].append(row)
    return parts


def token_logps(model: Any, samples: Sequence[Sample], *, temperature: float = 1.0) -> Tensor:
    """Return the log-probabilities (nats) from which each token with mask 1 was drawn [N, V], row after row.

    Only the positions that some row needs are put through the model's output layer, which for a large vocabulary is
    most of the memory.
    """
    ids_BL, position_N, row_N = padded(samples, model.device)
    kept = sorted({int(position) for position in position_N})
    place = {position: number for number, position in enumerate(kept)}
    # Padding is on the right and carries no loss, so under a causal mask it needs no mask of its own.
    output = model(input_ids=ids_BL, use_cache=False, logits_to_keep=torch.tensor(kept, device=model.device))
    at_N = torch.tensor([place[int(position)] for position in position_N], device=model.device)
    return torch.log_softmax(output.logits[row_N, at_N].float() / temperature, dim=-1)


def padded(samples: Sequence[Sample], device: torch.device) -> tuple[Tensor, list[int], Tensor]:
    """Pad token ids on the right [B, L]; name the position before each token with mask 1, and its row [N]."""
    longest = max(len(sample.token_ids) for sample in samples)
    ids = [list(sample.token_ids) + [0] * (longest - len(sample.token_ids)) for sample in samples]
    positions: list[int] = []
    rows: list[int] = []
    for row, sample in enumerate(samples):
        before = [place - 1 for place, said in enumerate(sample.mask) if said]
        positions += before
        rows += [row] * len(before)
    return torch.tensor(ids, device=device), positions, torch.tensor(rows, device=device)


def _turn_rewards(samples: Sequence[Sample]) -> tuple[Tensor, Tensor]:
    turns = max(len(sample.rewards) for sample in samples)
    rewards = [list(sample.rewards) + [0.0] * (turns - len(sample.rewards)) for sample in samples]
    exists = [[1.0] * len(sample.rewards) + [0.0] * (turns - len(sample.rewards)) for sample in samples]
    return torch.tensor(rewards), torch.tensor(exists)


def _said(sample: Sample, values: Sequence[Any]) -> list[Any]:
    """Return those of `values` [L] that belong to tokens of the policy."""
    return [value for value, said in zip(values, sample.mask, strict=True) if said]


def _flat(rows: Sequence[Sequence[float]], device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor([value for row in rows for value in row], device=device, dtype=dtype)
