"""The tasks of training, evaluation and checks: the seeds of an environment, or the tasks of its task set."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from random import Random

from envkit import registry
from envkit.errors import UsageError, did_you_mean
from envkit.protocols import NamedTaskSet, NotedTaskSet, TaskSet
from envkit.registry import EnvSpec
from envkit.types import JSON, Options, Task, stable_hash

ANY_SPLIT = "any"
"""Selects the levels or tasks of all splits."""

_OPEN: dict[str, tuple[tuple[int, int], TaskSet]] = {}
"""Open task sets by environment and options, with the version of their file. A task set may have read a large file."""


def task_set(spec: EnvSpec, options: Options) -> TaskSet | None:
    """Return the task set of an environment with these options; None if every seed is a task.

    A task set is opened once, and again if the file in its option ``file`` has changed.
    """
    if spec.task_set is None:
        return None
    key, chosen = Task(spec.id, 0, options).key, registry.defaults(spec, options)
    version = _version(chosen.get("file"))
    if key not in _OPEN or _OPEN[key][0] != version:
        found: TaskSet = registry.load(spec.task_set)(**chosen)
        _OPEN[key] = version, found if ANY_SPLIT in found.splits else _WithAny(found)
    return _OPEN[key][1]


class _WithAny:
    """A task set with another split, `ANY_SPLIT`, which joins all splits, or those that are endless."""

    def __init__(self, tasks: TaskSet) -> None:
        self._tasks = tasks
        self._own = tuple(tasks.splits)
        self._endless = [one for one in self._own if tasks.count(one) is None]
        self.splits: Sequence[str] = (*self._own, ANY_SPLIT)

    def count(self, split: str) -> int | None:
        if split != ANY_SPLIT:
            return self._tasks.count(split)
        return None if self._endless else sum(self._tasks.count(one) or 0 for one in self._own)

    def task(self, split: str, index: int) -> Task:
        if split != ANY_SPLIT:
            return self._tasks.task(split, index)
        if self._endless:
            index, place = divmod(index, len(self._endless))
            return self._tasks.task(self._endless[place], index)
        for one in self._own:
            if index < (count := self._tasks.count(one) or 0):
                return self._tasks.task(one, index)
            index -= count
        raise IndexError("the index is not below the number of tasks")

    def names(self, split: str) -> Sequence[str]:
        if not isinstance(self._tasks, NamedTaskSet):
            return ()
        return [name for one in (self._own if split == ANY_SPLIT else (split,)) for name in self._tasks.names(one)]

    def notes(self) -> Sequence[str]:
        return self._tasks.notes() if isinstance(self._tasks, NotedTaskSet) else ()


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
    """Return how many of `wanted` different tasks the split has. Raises `UsageError` if it is missing or empty."""
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


def names(spec: EnvSpec, options: Options, split: str) -> Sequence[str]:
    """Return the names of the tasks of a split, in order; empty if they have no names."""
    found = task_set(spec, options)
    return found.names(split) if isinstance(found, NamedTaskSet) else ()


def notes(spec: EnvSpec, options: Options) -> Sequence[str]:
    """Return what users should know about the tasks of an environment, one line each."""
    found = task_set(spec, options)
    return found.notes() if isinstance(found, NotedTaskSet) else ()


def content_of(options: Options) -> list[JSON]:
    """Return the paths and hashes of all files in the folder that the option ``tasks`` names; empty without one."""
    found: list[JSON] = []
    if isinstance(name := options.get("tasks"), str):
        folder = Path(name).expanduser()
        for path in sorted(folder.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                with path.open("rb") as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
                found.append([path.relative_to(folder).as_posix(), digest])
    return found


def select(spec: EnvSpec, options: Options, split: str, wanted: int | Sequence[int | str]) -> dict[str, Task]:
    """Return chosen tasks by name, or by index if they have no names. Raises `UsageError` if one is missing.

    `wanted` are names of tasks, also of other splits, or indices in the split; or the number of its first tasks, where
    0 means all. A text of digits is an index, unless a task of the split has this name.
    """
    found, known = task_set(spec, options), splits(spec, options)
    require_split(spec, known, split)
    size, listed = None if found is None else found.count(split), names(spec, options, split)
    if isinstance(wanted, int):
        if not wanted and size is None:
            raise UsageError(f"{spec.id} has any number of tasks in the split {split}; choose how many")
        wanted = range(wanted if size is None else min(wanted or size, size))
    chosen: dict[str, Task] = {}
    for one in wanted:
        is_index = str(one).isdecimal() and one not in listed
        place, index = (split, int(one)) if is_index else _find_name(spec, options, (split, *known), str(one))
        if is_index and size is not None and index >= size:
            raise UsageError(f"{spec.id} has {size} tasks in the split {split}, so there is no task {index}")
        name = str(one) if place != split or index >= len(listed) else listed[index]
        own = {**options, "split": split} if known else options
        chosen[name] = Task(spec.id, index, own) if found is None else found.task(place, index)
    if not chosen:
        raise UsageError(f"{spec.id}: its split {split!r} has no tasks; use another split or another file of tasks")
    return chosen


def _find_name(spec: EnvSpec, options: Options, places: Sequence[str], name: str) -> tuple[str, int]:
    """Return the first split of `places` with a task of this name, and the index of the task there."""
    every: dict[str, None] = {}
    for place in places:
        listed = list(names(spec, options, place))
        if name in listed:
            return place, listed.index(name)
        every.update(dict.fromkeys(listed))
    no_names = "; its tasks have only indices with these options (for those of a folder: --option tasks=DIR)"
    hint = did_you_mean(name, every, lists=False) if every else no_names
    raise UsageError(f"{spec.id} has no task {name!r}{hint}")


def require_split(spec: EnvSpec, known: Sequence[str], split: str) -> None:
    """Raise `UsageError` if an environment that has splits has no such split."""
    if known and split not in known:
        raise UsageError(f"{spec.id} has no split {split!r}{did_you_mean(split, known)}")


def with_split(spec: EnvSpec, options: Options, split: str) -> Options:
    """Return `options` plus the option ``split``, unless `split` is ``"any"`` or the environment has no splits."""
    require_split(spec, (*spec.splits, ANY_SPLIT) if spec.splits else (), split)
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
    require_split(spec, tasks.splits, split)
    return split
