"""Lessons as samples: a single state with its answer, or several unrelated states in a row, each with an answer."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from envkit.types import Sample

from .demonstrations import Lesson, unscored_sample


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
