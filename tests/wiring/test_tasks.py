"""The tasks of training and evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from envkit.errors import UsageError
from envkit.registry import EnvSpec
from envkit.types import JSON, Task
from envkit.wiring import tasks


@dataclass
class Words:
    """A task set of some words."""

    size: int | None = 5
    splits: Sequence[str] = ("train", "eval")

    def count(self, split: str) -> int | None:
        return self.size if split == "train" else 2

    def task(self, split: str, index: int) -> Task:
        return Task("Words-v0", index, {"split": split})


EVAL = [("eval", 0), ("eval", 1)]


def spec(**options: JSON) -> EnvSpec:
    return EnvSpec("Words-v0", "", options, task_set=Words)


def test_each_pass_plays_every_task_once_in_its_own_order() -> None:
    seeds = [tasks.task(spec(), {}, "train", 3, number).seed for number in range(15)]
    passes = [seeds[first : first + 5] for first in (0, 5, 10)]
    assert [sorted(one) for one in passes] == [[0, 1, 2, 3, 4]] * 3
    assert passes[0] != passes[1]


def test_the_order_depends_on_the_seed_alone() -> None:
    first, again, other = ([tasks.task(spec(), {}, "train", seed, one).seed for one in range(5)] for seed in (3, 3, 4))
    assert first == again
    assert first != other


def test_an_endless_split_has_a_new_task_for_each_number() -> None:
    drawn = {tasks.task(spec(), {"size": None}, "train", 3, number).seed for number in range(100)}
    assert len(drawn) == 100


def test_a_split_with_fewer_tasks_than_wanted_gives_all() -> None:
    assert tasks.count(spec(), {}, "eval", 100) == 2
    assert {one.seed for one in tasks.all_tasks(spec(), {}, "eval", 0, 100)} == {0, 1}


def test_a_missing_validation_split_is_taken_from_training() -> None:
    assert tasks.task(spec(), {}, "validation", 0, 0).options == {"split": "train"}


@pytest.mark.parametrize("size", [5, None])
def test_the_split_any_joins_the_splits_or_those_that_are_endless(size: int | None) -> None:
    chosen = tasks.select(spec(), {"size": size}, "any", 7).values()
    expected = [("train", index) for index in range(7)] if size is None else [*(("train", i) for i in range(5)), *EVAL]
    assert [(one.options["split"], one.seed) for one in chosen] == expected
    assert tasks.count(spec(), {"size": size}, "any", 100) == (100 if size is None else 7)


@pytest.mark.parametrize(
    ("options", "split", "message"),
    [({}, "trian", r"no split 'trian'.*train"), ({"size": 0}, "train", "split 'train' has no tasks")],
)
def test_a_split_that_cannot_be_used_is_named(options: dict[str, JSON], split: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        tasks.count(spec(), options, split, 1)


class Numbered(Words):
    """Tasks whose names are digits, as folders of challenges often have."""

    def names(self, split: str) -> Sequence[str]:
        return [str(10 + index) for index in range(self.size or 0)] if split == "train" else ["1", "0"]


def test_a_text_of_digits_is_the_name_of_a_task_if_there_is_one_and_an_index_otherwise() -> None:
    numbered = EnvSpec("Numbered-v0", "", task_set=Numbered)
    for wanted, expected in (("1", ("1", 0)), (1, ("0", 1)), ("0", ("0", 1))):
        (found,) = tasks.select(numbered, {}, "eval", [wanted]).items()
        assert (found[0], found[1].seed) == expected
    (found,) = tasks.select(numbered, {}, "train", ["2"]).items()
    assert (found[0], found[1].seed) == ("12", 2)


class Lines(Words):
    """One task for each line of a file."""

    opened = 0

    def __init__(self, file: str) -> None:
        type(self).opened += 1
        super().__init__(len(Path(file).read_text().splitlines()))


def test_a_task_set_is_opened_again_only_if_its_file_has_changed(tmp_path: Path) -> None:
    file = tmp_path / "lines.txt"
    lines = EnvSpec("Lines-v0", "", {"file": str(file)}, task_set=Lines)
    for text, size in (("a\nb\n", 2), ("a\nb\nc\n", 3)):
        file.write_text(text)
        assert [tasks.count(lines, {}, "train", 9) for _ in range(2)] == [size] * 2
    assert Lines.opened == 2


def test_the_content_of_a_folder_of_tasks_changes_with_its_files(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    found = []
    for text in ("42", "41", "42"):
        (tmp_path / "a" / "test.py").write_text(text)
        found.append(tasks.content_of({"tasks": str(tmp_path)}))
    assert found[0] == found[2] != found[1]


def test_without_a_task_set_every_seed_is_a_task() -> None:
    boards = EnvSpec("Boards-v0", "", splits=("train", "eval"))
    assert tasks.count(boards, {}, "train", 7) == 7
    assert tasks.task(boards, {"size": 4}, "train", 0, 0).options == {"size": 4, "split": "train"}
    assert tasks.task(boards, {}, "any", 0, 0).options == {}
