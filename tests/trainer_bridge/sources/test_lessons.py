"""Lessons: which of them an update of imitation draws, and how they become samples."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from envkit.trainer_bridge.sources.demonstrations import Lesson
from envkit.trainer_bridge.sources.lessons import LessonBook
from envkit.types import Sample
from tests.trainer_bridge.plain import plain

GOOD, OTHER = ((50,), (51,)), ((50,), (51,), (52,), (53,))


def lesson(number: int, *, is_hazardous: bool) -> Lesson:
    """A lesson whose prompt names it and whether it is tricky."""
    kind = 1 if is_hazardous else 0
    return Lesson((kind, number, 7), (kind, number, 8), GOOD, OTHER, is_hazardous)


BOOK = [lesson(number, is_hazardous=number % 10 == 0) for number in range(40)]


def draw(share: float, *, lessons: Sequence[Lesson] = BOOK, size: int = 50, noise: float = 0.0) -> list[Sample]:
    batch = LessonBook(lessons, share, noise, seed=3).batches(size)
    return [one for update in range(20) for one in batch(update)]


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_the_tricky_share_of_every_update_is_exact_however_rare_they_are(share: float) -> None:
    batch = LessonBook(BOOK, share, 0.0, seed=3).batches(50)
    for update in range(5):
        assert sum(one.token_ids[0] for one in batch(update)) == round(50 * share)
        assert len(batch(update)) == 50


@pytest.mark.parametrize("noise", [0.0, 0.4])
def test_so_many_lessons_show_a_random_move(noise: float) -> None:
    samples = draw(0.5, noise=noise)
    good = sum((int(one.token_ids[-1]),) in GOOD for one in samples) / len(samples)
    # A random move is one of four, and two of them are good.
    assert good == (pytest.approx(1 - noise / 2, abs=0.05) if noise else 1.0)


def test_only_the_answer_carries_loss() -> None:
    one = draw(0.5)[0]
    assert one.token_ids[2] == 7
    assert one.mask.tolist() == [False, False, False, True]
    assert one.turn_ids.tolist() == [0, 0, 0, 0]


def test_strung_lessons_are_turns_of_one_sequence_each_with_its_own_answer() -> None:
    batch = LessonBook(BOOK, 0.5, 0.0, seed=3).batches(10, states=4)
    samples = batch(0)
    assert [len(one.token_ids) for one in samples] == [16, 16, 8]  # four, four and the two that are left
    for one in samples:
        turns = len(one.token_ids) // 4
        assert one.mask.tolist() == [False, False, False, True] * turns
        assert one.turn_ids.tolist() == [turn for turn in range(turns) for _ in range(4)]
        assert one.token_ids[2::4].tolist() == [7] + [8] * (turns - 1)
    assert sum(tricky for one in samples for tricky in one.token_ids[::4]) == 5


def test_an_update_draws_the_same_again_and_every_update_something_else() -> None:
    batch = LessonBook(BOOK, 0.5, 0.5, seed=3).batches(20)
    assert plain(batch(4)) == plain(LessonBook(BOOK, 0.5, 0.5, seed=3).batches(20)(4))
    assert plain(batch(4)) != plain(batch(5))
    assert plain(batch(4)) != plain(LessonBook(BOOK, 0.5, 0.5, seed=4).batches(20)(4))
