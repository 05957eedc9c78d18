"""Options of the environment, and which task belongs to a seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal

from envkit.errors import OptionError, did_you_mean
from envkit.types import JSON, Options, Task, stable_hash

from ..options import (
    check_boolean,
    check_choice,
    check_image,
    check_integer,
    check_path,
    check_range,
    check_split,
    override_known,
)
from ..split import SPLITS, Split, split_of
from .families import FAMILIES, HELD_OUT, write_drawn
from .families.family import MAX_DIFFICULTY
from .formats import left_out, read_task, read_tasks
from .tasks import ScratchFolder, TerminalTask

OWN_TASKS = Path(__file__).with_name("own")
"""The tasks that envkit contains, which are a test set."""
OWN = "own"
OF_TASK = "task"
ANY = "any"
_GROUPS = ("train", "held_out", "all")
_MIN_TASKS = 10
"""Folders with fewer tasks have the same tasks in every split."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TerminalOptions:
    """Options of the environment.

    Attributes:
        tasks: Folder of one task, or of several; ``"own"`` means the tasks that envkit contains. None means generated
            tasks.
        families: Families of generated tasks: ``"train"``, ``"held_out"``, ``"all"``, or a list of names.
        difficulty: Difficulty of generated tasks, 1 to 5, or the smallest and largest one.
        split: Only tasks of this split ("train", "validation" or "eval"); None means any.
        mode: ``"bash"``: the agent has a shell, a viewer and an editor. ``"screen"``: it has the keys and the screen of
            a terminal. ``"script"``: its answer to the instruction is one shell script, which runs once.
        image: Image of the sandboxes of portable tasks, with Python 3.9 or later. ``"task"`` means the image of the
            task, which ``envkit tasks Terminal-v0 build`` makes, and None the default of the backend. Other tasks
            always have their own image.
        network: ``"none"``, or ``"task"`` for the network that the task asks for.
        keep_processes: Whether processes of the agent go on during the verification, if it shares the agent's sandbox.
    """

    tasks: str | None = None
    families: str | Sequence[str] = "train"
    difficulty: int | Sequence[int] = (1, 3)
    split: Split | None = None
    mode: Literal["bash", "screen", "script"] = "bash"
    image: str | None = None
    network: Literal["none", "task"] = "none"
    keep_processes: bool = False

    def __post_init__(self) -> None:
        check_path("tasks", self.tasks)
        check_split(self.split)
        if isinstance(self.difficulty, int):
            check_integer("difficulty", self.difficulty, low=1, high=MAX_DIFFICULTY)
        else:
            check_range("difficulty", self.difficulty, low=1, high=MAX_DIFFICULTY)
        check_choice("mode", self.mode, ("bash", "screen", "script"))
        check_choice("network", self.network, ("none", "task"))
        check_image(self.image)
        check_boolean("keep_processes", self.keep_processes)
        _ = self.family_names

    @property
    def family_names(self) -> Sequence[str]:
        """The names of the chosen families.

        Raises:
            OptionError: There is no such family.
        """
        chosen = self.families
        if isinstance(chosen, str) and chosen in _GROUPS:
            is_held_out = {"train": (False,), "held_out": (True,), "all": (False, True)}[chosen]
            return [name for name in FAMILIES if (name in HELD_OUT) in is_held_out]
        names = [chosen] if isinstance(chosen, str) else list(chosen)
        for name in names:
            if name not in FAMILIES:
                hint = did_you_mean(str(name), [*FAMILIES, *_GROUPS])
                raise OptionError("families", f"there is no family {name!r}{hint}")
        if not names:
            raise OptionError("families", "must name at least one family")
        return names

    @property
    def folder(self) -> Path | None:
        """Folder of the tasks; None if they are generated."""
        if self.tasks is None:
            return None
        return OWN_TASKS if self.tasks == OWN else Path(self.tasks).expanduser()

    def all(self) -> Sequence[TerminalTask]:
        """Return the tasks of the split in the folder.

        Raises:
            OptionError: The split has no tasks.
            UsageError, ConfigError: The folder cannot be used.
        """
        assert self.folder is not None, "generated tasks are endless"
        if self.tasks == OWN and self.split not in (None, "eval"):
            raise OptionError("split", f"the tasks of envkit are a test set: {self.split!r} does not exist; use eval")
        found = tasks_in(self.folder, None if self.tasks == OWN else self.split)
        if not found:
            raise OptionError("split", f"{self.folder} has no task of the split {self.split!r}")
        return found

    def drawn(self, seed: int) -> tuple[str, int, int]:
        """Return family, seed and difficulty of the generated task of `seed`, the same in every process."""
        names = self.family_names
        low, high = (self.difficulty,) * 2 if isinstance(self.difficulty, int) else self.difficulty
        attempt = 0
        while True:
            choice = stable_hash("terminal task", seed, attempt)
            family, difficulty = names[choice % len(names)], low + (choice >> 16) % (high - low + 1)
            number = choice >> 33
            if self.split is None or split_of(_text(family, number, difficulty)) == self.split:
                return family, number, difficulty
            attempt += 1

    def task(self, seed: int) -> TerminalTask:
        """Return the task of a seed, the same in every process. The folder of a generated one is a `ScratchFolder`."""
        if self.folder is not None:
            found = self.all()
            return found[seed % len(found)]
        family, number, difficulty = self.drawn(seed)
        scratch = ScratchFolder()
        write_drawn(FAMILIES[family], number, difficulty, scratch.path)
        return replace(read_task(scratch.path), scratch=scratch)


@lru_cache(maxsize=4096)
def _text(family: str, number: int, difficulty: int) -> str:
    """Return the text whose hash decides the split of a generated task: tasks with equal texts are in one split."""
    return FAMILIES[family].task(number, difficulty).instruction


@lru_cache(maxsize=32)
def tasks_in(folder: Path, split: Split | None = None) -> Sequence[TerminalTask]:
    """Return the tasks of a split of a folder, sorted by name; see `read_tasks` for the errors."""
    if split is None:
        return sorted(read_tasks(folder), key=lambda task: task.name)
    tasks = tasks_in(folder, None)
    return tasks if len(tasks) < _MIN_TASKS else [task for task in tasks if split_of(task.name) == split]


class TerminalTasks:
    """The tasks of the environment; see `envkit.protocols.TaskSet`.

    The number of generated tasks is not limited. The tasks of a folder are split by their names; those of envkit are
    all in ``eval``. The split ``any`` has all tasks.

    Args:
        options: Options of the environment.
    """

    def __init__(self, **options: JSON) -> None:
        self._options: Options = options
        chosen = options_of(options)  # rejects wrong options
        self.splits: Sequence[str] = ("eval", ANY) if chosen.tasks == OWN else (*SPLITS, ANY)

    def count(self, split: str) -> int | None:
        chosen = options_of(self._with(split))
        return None if chosen.folder is None else len(chosen.all())

    def task(self, split: str, index: int) -> Task:
        return Task("Terminal-v0", index, self._with(split))

    def names(self, split: str) -> Sequence[str]:
        chosen = options_of(self._with(split))
        return [] if chosen.folder is None else [task.folder.name for task in chosen.all()]

    def notes(self) -> Sequence[str]:
        chosen = options_of(self._with(ANY))
        return [] if chosen.folder is None else left_out(chosen.folder, chosen.all())

    def _with(self, split: str) -> Mapping[str, JSON]:
        return {**self._options, "split": None if split == ANY else split}


def options_of(options: Options) -> TerminalOptions:
    """Return the options of Terminal among `options`, which may also contain the limits of `ToolEnv`."""
    return override_known(TerminalOptions(), options)
