"""Warm-up: a policy that knows nothing imitates demonstrations of mixed quality until reinforcement can take over.

Lessons show single states, which is where features are learned; then several unrelated ones in a row, which teaches
that the newest is the one to answer; whole episodes come last. That last stage ends by a rule and not by a count, since
seeds differ in how much they need.
"""

from __future__ import annotations

import math
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from envkit import clock
from envkit.trainer_bridge.demonstrations import Lesson, unscored_sample
from envkit.trainer_bridge.trainers.torch_local import passes, token_logps
from envkit.types import Sample


@dataclass(frozen=True, slots=True)
class Stage:
    """A number of imitation updates.

    Attributes:
        updates: Bound on their number.
        batch: Samples an update.
        learning_rate: First step size; it falls as a cosine to a twentieth.
    """

    updates: int
    batch: int
    learning_rate: float


class Imitator:
    """Makes a policy say what demonstrations say.

    Args:
        model: The policy, on its device.
        max_grad_norm: Bound on the gradient's norm.
        micro_tokens: Bound on the tokens of one pass, padding included.
    """

    def __init__(self, model: Any, *, max_grad_norm: float, micro_tokens: int) -> None:
        self._model = model
        self._max_grad_norm = max_grad_norm
        self._micro_tokens = micro_tokens

    async def run(
        self,
        stage: Stage,
        batch: Callable[[int], Sequence[Sample]],
        *,
        after: Callable[[int, float], Awaitable[bool]],
    ) -> int:
        """Run a stage.

        Args:
            stage: How long and how fast.
            batch: Gives the samples of an update, by its number from 0.
            after: Called after each update with the number of updates so far and its loss (nats a token); True ends
                the stage.

        Returns:
            The number of updates that were made.
        """
        optimizers = _optimizers(self._model)
        for update in range(stage.updates):
            share = update / stage.updates
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = stage.learning_rate * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * share)))
            loss = await clock.to_thread(self._update, optimizers, batch(update))
            if await after(update + 1, loss):
                return update + 1
        return stage.updates

    def _update(self, optimizers: Sequence[torch.optim.Optimizer], samples: Sequence[Sample]) -> float:
        tokens = sum(sum(sample.mask) for sample in samples)
        total = 0.0
        self._model.zero_grad()
        for part in passes(samples, self._micro_tokens):
            chosen = [samples[row] for row in part]
            logp_NV = token_logps(self._model, chosen)
            said = [token for sample in chosen for token, own in zip(sample.token_ids, sample.mask, strict=True) if own]
            token_N1 = torch.tensor(said, device=logp_NV.device)[:, None]
            loss = -logp_NV.gather(1, token_N1).sum() / tokens
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._max_grad_norm)
        for optimizer in optimizers:
            optimizer.step()
        return total


def _optimizers(model: Any) -> list[torch.optim.Optimizer]:
    """Muon for the matrices between the layers, AdamW for embeddings and gains.

    From nothing, Muon learns the lake's holes in far fewer updates than AdamW alone (`docs/train.md`).
    """
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
        tricky_share: Share of an update that is drawn from the tricky ones, if there are any.
        noise: Share that shows any move instead of a good one.
        seed: What is drawn for an update follows from this and its number.
    """

    lessons: Sequence[Lesson]
    tricky_share: float
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
        tricky_count = 0 if not tricky else size if not plain else round(size * self.tricky_share)

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
