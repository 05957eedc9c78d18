"""Warm-up: a policy imitates demonstrations, or the dialogues of a file, until reinforcement can take over.

Lessons show single states, which is where features are learned; then several unrelated ones in a row, which teaches
that the newest is the one to answer; whole episodes come last. That last stage ends by a rule and not by a count, since
seeds differ in how much they need.
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
from ..trainers.batching import flat, row_passes, said
from ..trainers.checkpoint import UNREADABLE
from ..trainers.optimizer import adamw
from ..trainers.token_logps import TokenScorer, token_logps
from .demonstrations import Lesson, unscored_sample

STATE = "warmup.pt"
"""File of a checkpoint; only one that was written in the warm-up has it."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A number of imitation updates.

    Attributes:
        updates: Bound on their number.
        batch: Samples an update.
        learning_rate: First step size; it falls as a cosine to a twentieth.
        number: Its place among the stages of a warm-up, from 0.
    """

    updates: int
    batch: int
    learning_rate: float
    number: int = 0


class Imitator:
    """Makes a policy say what demonstrations say.

    Args:
        model: The policy, on its device.
        max_grad_norm: Bound on the gradient's norm.
        micro_tokens: Bound on the tokens of one pass, padding included.
        threads: Threads of torch that learn; 0 leaves their number as it is.
        stop: Learns what a stop has to wait for.
        is_pretrained: Whether the policy was trained before; AdamW alone then moves it, and its log-probabilities are
            computed in blocks.
        precision: Of matrix products of a pretrained policy; see `TokenScorer`.

    Attributes:
        stage: Number of the stage that was begun last.
        updates: Updates of that stage that the weights have seen.
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
    ) -> None:
        self._model = model
        self._max_grad_norm = max_grad_norm
        self._micro_tokens = micro_tokens
        self._threads = threads
        self._stop = stop or Stop()
        self._is_pretrained = is_pretrained
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
        """Run a stage, from its first update or from where `restore` left it.

        Args:
            stage: How long and how fast.
            batch: Gives the samples of an update, by its number from 0.
            after: Called after each update with the number of updates so far and its loss (nats a token); True ends
                the stage. A restored stage begins with a call for the update before, whose loss is then NaN.

        Returns:
            The number of updates that the stage has.
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

    def save(self, folder: str) -> None:
        """Write optimisers and counters into `folder`, which exists."""
        state = {
            "stage": self.stage,
            "updates": self.updates,
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
        }
        with (Path(folder) / STATE).open("wb") as file:  # given a path, torch hides what the system said
            torch.save(state, file)

    def restore(self, folder: Path) -> None:
        """Continue where `save` was called; the weights come with the trainer's part of the checkpoint.

        Raises:
            UsageError: The folder does not hold the state of a warm-up of this policy.
        """
        try:
            state = torch.load(folder / STATE, weights_only=True)
            for optimizer, content in zip(self._optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(content)
            self.stage, self.updates = int(state["stage"]), int(state["updates"])
        except UNREADABLE as error:
            raise UsageError(f"{folder / STATE}: damaged; start again with --force") from error

    def _update(self, samples: Sequence[Sample]) -> float:
        with torch_threads(self._threads):
            return self._learn(samples)

    def _learn(self, samples: Sequence[Sample]) -> float:
        tokens = sum(sum(sample.mask) for sample in samples)
        total = 0.0
        self._model.zero_grad()
        shares_rows = self._scorer is not None and self._scorer.shares_rows
        for part in row_passes(samples, self._micro_tokens, shares_rows=shares_rows):
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
        token_N = flat([said(sample, sample.token_ids) for sample in samples], logp_NV.device, torch.long)
        return logp_NV.gather(1, token_N[:, None]).squeeze(1)


def _optimizers(model: Any, *, is_pretrained: bool) -> list[torch.optim.Optimizer]:
    """AdamW for a pretrained policy; else Muon for the matrices between the layers, AdamW for embeddings and gains.

    From nothing, Muon learns the lake's holes in far fewer updates than AdamW alone (`docs/train.md`).
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
    """Draws lessons.

    Attributes:
        lessons: All of them.
        hazard_share: Share of an update that is drawn from the tricky ones, if there are any.
        noise: Share that shows any move instead of a good one.
        seed: What is drawn for an update follows from this and its number.
    """

    lessons: Sequence[Lesson]
    hazard_share: float
    noise: float
    seed: int

    def batches(self, size: int, *, strung: int = 1) -> Callable[[int], list[Sample]]:
        """Return a function that gives the samples of an update by its number.

        Args:
            size: Lessons an update.
            strung: Lessons of one sample: unrelated states as turns of one sequence, each with its own answer. They
                teach that the newest state is the one that counts.
        """
        tricky = [lesson for lesson in self.lessons if lesson.is_tricky]
        plain = [lesson for lesson in self.lessons if not lesson.is_tricky]
        tricky_count = 0 if not tricky else size if not plain else round(size * self.hazard_share)

        def batch(update: int) -> list[Sample]:
            rng = random.Random(self.seed * 1_000_003 + update)
            drawn = rng.choices(tricky, k=tricky_count) if tricky_count else []
            if tricky_count < size:
                drawn += rng.choices(plain, k=size - tricky_count)
            rng.shuffle(drawn)
            return [self._sample(drawn[first : first + strung], rng) for first in range(0, size, strung)]

        return batch

    def _sample(self, lessons: Sequence[Lesson], rng: random.Random) -> Sample:
        ids: tuple[int, ...] = ()
        mask: tuple[int, ...] = ()
        turn_ids: tuple[int, ...] = ()
        for turn, lesson in enumerate(lessons):
            given = lesson.continuation if turn else lesson.prompt
            said = rng.choice(lesson.possible if rng.random() < self.noise else lesson.good)
            ids += given + said
            mask += (0,) * len(given) + (1,) * len(said)
            turn_ids += (turn,) * (len(given) + len(said))
        return unscored_sample(ids, mask, turn_ids)
