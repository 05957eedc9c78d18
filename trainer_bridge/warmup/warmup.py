"""Warm-up: a policy imitates demonstrations or the dialogues of a file before reinforcement learning.

A warm-up with demonstrations has three stages. In the first stage, a sample is a single state with a move, so that the
policy learns to read states. In the second stage, a sample is several unrelated states in a row, each with a move, so
that the policy learns to answer only the newest state. In the third stage, samples are whole episodes. The third stage
ends when the policy's greedy play is good enough, since the number of updates required differs between seeds.
"""

from __future__ import annotations

import math
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from envkit import clock
from envkit.errors import UsageError
from envkit.types import Sample

from ..stopping import Stop
from ..threads import torch_threads
from ..trainers.batching import flat, row_passes
from ..trainers.checkpoint import UNREADABLE
from ..trainers.optimizer import adamw
from ..trainers.token_logps import TokenScorer, token_logps
from .demonstrations import Lesson, unscored_sample

STATE = "warmup.pt"
"""Name of the file with the warm-up's state, in checkpoints written during the warm-up."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of the warm-up: a series of imitation updates.

    Attributes:
        updates: Maximum number of updates.
        batch: Samples per update.
        learning_rate: Initial learning rate; over the stage, it decays along a cosine to a twentieth of this value.
        number: Index of the stage in the warm-up, from 0.
    """

    updates: int
    batch: int
    learning_rate: float
    number: int = 0


class Imitator:
    """Trains a policy to imitate demonstrations.

    Args:
        model: The policy, on its device.
        max_grad_norm: Maximum norm of the gradient; larger gradients are clipped.
        micro_tokens: Maximum number of tokens in one pass, including padding.
        threads: Number of torch threads; 0 means the current number.
        stop: Reports to the user, after a stop was requested, that the run waits for the current update.
        is_pretrained: Whether the policy is a pretrained model. If so, AdamW is the only optimiser, and
            log-probabilities are computed in blocks.
        precision: Precision of a pretrained policy's matrix products; see `TokenScorer`.
        packing: Whether short samples without a common prefix share rows; only for a pretrained policy.

    Attributes:
        stage: Index of the current stage.
        updates: Number of finished updates in the current stage.
    """

    def __init__(
        self,
        model: Any,
        *,
        max_grad_norm: float,
        micro_tokens: int,
        threads: int = 0,
        stop: Stop | None = None,
        is_pretrained: bool = False,
        precision: str = "float32",
        packing: bool = False,
    ) -> None:
        self._model = model
        self._max_grad_norm = max_grad_norm
        self._micro_tokens = micro_tokens
        self._threads = threads
        self._stop = stop or Stop()
        self._is_pretrained = is_pretrained
        self._packing = packing
        self._scorer = TokenScorer(model, precision=precision, in_blocks=True) if is_pretrained else None
        self.stage = 0
        self.updates = 0
        self._optimizers = _optimizers(model, is_pretrained=is_pretrained)

    async def run(
        self,
        stage: Stage,
        batch: Callable[[int], Sequence[Sample]],
        *,
        after: Callable[[int, float], Awaitable[bool]],
    ) -> int:
        """Run a stage from its first update, or continue it if `restore` has loaded it; skip an earlier stage.

        Args:
            stage: The stage to run.
            batch: Returns the samples of an update, given the update's index from 0.
            after: Called after each update with the number of finished updates and the loss (nats per token). The stage
                ends if `after` returns True. A stage that continues begins with this call for the last finished update,
                with NaN as the loss.

        Returns:
            The number of finished updates in the stage.
        """
        if stage.number < self.stage:
            return stage.updates
        if stage.number > self.stage:
            self.stage, self.updates = stage.number, 0
            self._optimizers = _optimizers(self._model, is_pretrained=self._is_pretrained)
        if self.updates and await after(self.updates, math.nan):
            return self.updates
        while self.updates < stage.updates:
            share = self.updates / stage.updates
            for optimizer in self._optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = stage.learning_rate * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * share)))
            with self._stop.waits_for("an update of the warm-up"):
                loss = await clock.to_thread(self._update, batch(self.updates))
            if await after(self.updates, loss):
                break
        return self.updates

    async def save(self, folder: str) -> None:
        """Write the state of the optimisers, and the index of the stage and update, into the existing `folder`."""
        state = {
            "stage": self.stage,
            "updates": self.updates,
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
        }
        await clock.to_thread(_write, state, Path(folder) / STATE)

    def restore(self, folder: Path) -> None:
        """Restore the state that `save` wrote. The trainer restores the weights, which are not part of this state.

        Raises:
            UsageError: The folder has no warm-up state for this policy.
        """
        try:
            state = torch.load(folder / STATE, weights_only=True, map_location="cpu")
            for optimizer, content in zip(self._optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(content)
            self.stage, self.updates = int(state["stage"]), int(state["updates"])
        except UNREADABLE as error:
            raise UsageError(f"{folder / STATE}: damaged; start again with --force") from error

    def _update(self, samples: Sequence[Sample]) -> float:
        with torch_threads(self._threads):
            return self._learn(samples)

    def _learn(self, samples: Sequence[Sample]) -> float:
        tokens = sum(sample.num_policy_tokens for sample in samples)
        total = 0.0
        self._model.zero_grad()
        shares_rows = self._scorer is not None and self._scorer.shares_rows
        for part in row_passes(samples, self._micro_tokens, shares_rows=shares_rows, packs=self._packing):
            loss = -self._logps([[samples[number] for number in row] for row in part]).sum() / tokens
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._max_grad_norm)
        for optimizer in self._optimizers:
            optimizer.step()
        self.updates += 1
        return total

    def _logps(self, rows: Sequence[Sequence[Sample]]) -> torch.Tensor:
        """Return the log-probabilities (nats) of the tokens with mask 1 [N], sample after sample."""
        if self._scorer is not None:
            return self._scorer.score(rows).logp_N
        samples = [sample for row in rows for sample in row]
        logp_NV = token_logps(self._model, samples)
        token_N = flat([sample.token_ids[sample.mask] for sample in samples], logp_NV.device, torch.long)
        return logp_NV.gather(1, token_N[:, None]).squeeze(1)


def _write(state: object, path: Path) -> None:
    # Pass torch an open file: if torch opens a path itself, it hides the operating system's error.
    with path.open("wb") as file:
        torch.save(state, file)


def _optimizers(model: Any, *, is_pretrained: bool) -> list[torch.optim.Optimizer]:
    """Return AdamW for a pretrained policy, otherwise Muon for the layers' matrices and AdamW for all other weights.

    With Muon, a policy with random initial weights needs far fewer updates to play frozen lake (`docs/imitation.md`).
    """
    if is_pretrained:
        return [adamw(model, 0.0, is_fused=True)]
    embeddings = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
    inner = [weight for weight in model.parameters() if weight.ndim == 2 and id(weight) not in embeddings]
    outer = [weight for weight in model.parameters() if weight.ndim != 2 or id(weight) in embeddings]
    return [
        torch.optim.Muon(inner, lr=0.0, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(outer, lr=0.0, betas=(0.9, 0.95), weight_decay=0.0),
    ]


@dataclass(frozen=True, slots=True)
class LessonBook:
    """Draws random lessons for imitation. A lesson is a state with its good and its possible moves.

    Attributes:
        lessons: All lessons to draw from.
        hazard_share: Share of hazardous states in an update, if `lessons` has both hazardous and other states.
        noise: Probability that the policy imitates a random possible move in a state instead of a good one.
        seed: Seed of the draws; each update has its own seed, derived from this one and the update's index.
    """

    lessons: Sequence[Lesson]
    hazard_share: float
    noise: float
    seed: int

    def batches(self, size: int, *, states: int = 1) -> Callable[[int], list[Sample]]:
        """Return a function that maps the index of an update to its samples.

        Args:
            size: Lessons per update.
            states: Lessons per sample. Each lesson becomes a turn of the sample: its state, then a move. With several
                unrelated turns in a sample, the policy learns to answer only the newest state.
        """
        tricky = [lesson for lesson in self.lessons if lesson.is_hazardous]
        plain = [lesson for lesson in self.lessons if not lesson.is_hazardous]
        tricky_count = 0 if not tricky else size if not plain else round(size * self.hazard_share)

        def batch(update: int) -> list[Sample]:
            rng = random.Random(self.seed * 1_000_003 + update)
            drawn = rng.choices(tricky, k=tricky_count) if tricky_count else []
            if tricky_count < size:
                drawn += rng.choices(plain, k=size - tricky_count)
            rng.shuffle(drawn)
            return [self._sample(drawn[first : first + states], rng) for first in range(0, size, states)]

        return batch

    def _sample(self, lessons: Sequence[Lesson], rng: random.Random) -> Sample:
        ids: tuple[int, ...] = ()
        mask: tuple[int, ...] = ()
        turn_ids: tuple[int, ...] = ()
        for turn, lesson in enumerate(lessons):
            given = lesson.continuation if turn else lesson.prompt
            answer = rng.choice(lesson.possible if rng.random() < self.noise else lesson.good)
            ids += given + answer
            mask += (0,) * len(given) + (1,) * len(answer)
            turn_ids += (turn,) * (len(given) + len(answer))
        return unscored_sample(ids, mask, turn_ids)
