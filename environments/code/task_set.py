"""Options of the environment, and which problem belongs to a seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from envkit.errors import OptionError
from envkit.types import JSON, Options, SandboxSpec, Task

from ..options import (
    check_boolean,
    check_choice,
    check_image,
    check_integer,
    check_number,
    check_path,
    check_range,
    check_split,
    override_known,
)
from ..split import SPLITS, Split, split_of
from .loaders import FORMATS, load_problems
from .tasks import MAX_LEVEL, Problem, draw_problem


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeOptions:
    """Options of the programming tasks.

    Attributes:
        level: Number of operations of a generated problem, 1 to 6, or the smallest and largest number.
        mode: ``"answer"``: the action is the solution. ``"tools"``: the player works in a sandbox.
        split: Only problems of this split ("train", "validation" or "eval"); None means any.
        file: File of problems to use instead of generated ones: one JSON object per line.
        format: Format of the file: ``"kodcode"`` or ``"livecodebench"``.
        timeout_s: Maximum seconds in which a submission must complete all tests.
        partial: Whether the reward is the share of tests that pass, instead of 1.0 only if all pass.
        image: Image of the sandboxes, with Python 3.8 or later; None means the default of the backend.
    """

    level: int | Sequence[int] = (1, 3)
    mode: Literal["answer", "tools"] = "answer"
    split: Split | None = None
    file: str | None = None
    format: str = "kodcode"
    timeout_s: float = 10.0
    partial: bool = False
    image: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.level, int):
            check_integer("level", self.level, low=1, high=MAX_LEVEL)
        else:
            check_range("level", self.level, low=1, high=MAX_LEVEL)
        check_choice("mode", self.mode, ("answer", "tools"))
        check_split(self.split)
        check_path("file", self.file)
        check_choice("format", self.format, FORMATS)
        check_number("timeout_s", self.timeout_s, low=0.1, high=3600)
        check_boolean("partial", self.partial)
        check_image(self.image)

    @property
    def spec(self) -> SandboxSpec:
        """Spec of the sandboxes of tools and graders."""
        return SandboxSpec(image=self.image, untrusted=True)

    def problem(self, seed: int) -> Problem:
        """Return the problem of `seed`, the same in every process.

        Raises:
            OptionError: The file cannot be used, or there is no such problem.
        """
        if self.file is not None:
            problems = self.problems()
            return problems[seed % len(problems)]
        low, high = (self.level, self.level) if isinstance(self.level, int) else self.level
        return draw_problem(seed, low, high, self.split)

    def problems(self) -> Sequence[Problem]:
        """Return the problems of the split in the file."""
        assert self.file is not None, "generated problems are endless"
        problems = load_problems(self.file, self.format).problems
        found = [one for one in problems if self.split is None or split_of(one.text) == self.split]
        if not found:
            raise OptionError("split", f"{self.file} has no problem of the split {self.split!r}")
        return found


def options_of(options: Options) -> CodeOptions:
    """Return the options among `options` that are not limits of `ToolEnv`."""
    return override_known(CodeOptions(), options)


class CodeTasks:
    """The tasks of the environment; see `envkit.protocols.TaskSet`. Generated tasks are endless.

    The split ``any`` has all tasks.

    Args:
        options: See `CodeOptions`.
    """

    splits: Sequence[str] = (*SPLITS, "any")

    def __init__(self, **options: JSON) -> None:
        self._options: Options = options
        options_of(options)  # rejects wrong options

    def count(self, split: str) -> int | None:
        options = options_of(self._with(split))
        return None if options.file is None else len(options.problems())

    def task(self, split: str, index: int) -> Task:
        return Task("Code-v0", index, self._with(split))

    def notes(self) -> Sequence[str]:
        options = options_of(self._options)
        return () if options.file is None else load_problems(options.file, options.format).notes

    def _with(self, split: str) -> Options:
        return {**self._options, "split": None if split == "any" else split}
