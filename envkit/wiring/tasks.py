"""The tasks of training and evaluation: the seeds of an environment, or the tasks of its task set."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from random import Random

from envkit import registry
from envkit.errors import UsageError, did_you_mean
from envkit.protocols import TaskSet
from envkit.registry import EnvSpec
from envkit.types import Options, Task, stable_hash

ANY_SPLIT = "any"
"""Selects the levels of all splits of an environment without a task set."""

_OPEN: dict[str, tuple[tuple[int, int], TaskSet]] = {}
"""Open task sets by environment and options, with the version of their file. A task set may have read a large file."""


def task_set(spec: EnvSpec, options: Options) -> TaskSet | None:
    """Return the task set of an environment with these options; None if every seed is a task.

    A task set is opened once, and again if the file in its option ``file`` has changed.

    Raises:
        OptionError: The task set rejects an option.
        UsageError: A file of the task set cannot be used.
    """
    if spec.task_set is None:
        return None
    key, chosen = Task(spec.id, 0, options).key, registry.defaults(spec, options)
    version = _version(chosen.get("file"))
    if key not in _OPEN or _OPEN[key][0] != version:
        _OPEN[key] = version, registry.load(spec.task_set)(**chosen)
    return _OPEN[key][1]


def _version(file: object) -> tuple[int, int]:
    """Return the modification time in nanoseconds and the size of a file; zeros if `file` is no path of a file."""
    if not isinstance(file, str) or not Path(file).is_file():
        return 0, 0
    status = Path(file).stat()
    return status.st_mtime_ns, status.st_size


def splits(spec: EnvSpec, options: Options) -> tuple[str, ...]:
    """Return the names of the splits; empty if the environment has none."""
    found = task_set(spec, options)
    return spec.splits if found is None else tuple(found.splits)


def count(spec: EnvSpec, options: Options, split: str, wanted: int) -> int:
    """Return how many of `wanted` different tasks the split has.

    Raises:
        UsageError: There is no such split, or it is empty.
    """
    found = task_set(spec, options)
    if found is None:
        with_split(spec, options, split)
        return wanted
    limit = found.count(_split_of(spec, found, split))
    if limit == 0:
        raise UsageError(f"{spec.id}: its split {split!r} has no tasks; use another split or another file of tasks")
    return wanted if limit is None else min(wanted, limit)


def task(spec: EnvSpec, options: Options, split: str, seed: int, number: int) -> Task:
    """Return the task with index `number` of a split. Every process computes the same task for the same arguments.

    The order of a task set depends on `seed`. After its last task, it begins again in another order.

    Raises:
        UsageError: There is no such split.
    """
    found = task_set(spec, options)
    if found is None:
        return Task(spec.id, stable_hash(seed, split, number) >> 33, with_split(spec, options, split))
    split = _split_of(spec, found, split)
    limit = found.count(split)
    if limit is None:
        return found.task(split, stable_hash(seed, split, number) >> 33)
    epoch, place = divmod(number, limit)
    return found.task(split, _order(seed, split, epoch, limit)[place])


def all_tasks(spec: EnvSpec, options: Options, split: str, seed: int, wanted: int) -> Iterator[Task]:
    """Yield `wanted` different tasks of a split, or all if it has fewer."""
    for number in range(count(spec, options, split, wanted)):
        yield task(spec, options, split, seed, number)


def with_split(spec: EnvSpec, options: Options, split: str) -> Options:
    """Return `options` plus the option ``split``, unless `split` is ``"any"`` or the environment has no splits.

    Raises:
        UsageError: The environment has no such split.
    """
    if spec.splits and split not in (*spec.splits, ANY_SPLIT):
        raise _no_split(spec, split, (*spec.splits, ANY_SPLIT))
    return {**options, "split": split} if split in spec.splits else options


@lru_cache(maxsize=8)
def _order(seed: int, split: str, epoch: int, limit: int) -> list[int]:
    """Return the order of the tasks in one pass through a split."""
    order = list(range(limit))
    Random(stable_hash(seed, split, "order", epoch)).shuffle(order)
    return order


def _split_of(spec: EnvSpec, tasks: TaskSet, split: str) -> str:
    """Return the split to use for `split`: the same, or train for a missing validation split."""
    if split in tasks.splits:
        return split
    if split == "validation" and "train" in tasks.splits:
        return "train"
    raise _no_split(spec, split, tasks.splits)


def _no_split(spec: EnvSpec, split: str, known: Sequence[str]) -> UsageError:
    return UsageError(f"{spec.id} has no split {split!r}{did_you_mean(split, known)}")
