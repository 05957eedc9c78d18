"""Players of the programming tasks: the oracle, which knows the solution, and one that does nothing.

They play in both modes: in one answer, or with calls of tools.
"""

from __future__ import annotations

from envkit.errors import UsageError
from envkit.protocols import EpisodePlayer, Player
from envkit.types import JSON, Options, Reset, RolloutRequest, Task

from ..options import override
from ..tools import Script, write_call
from .grading import SOLUTION
from .task_set import CodeOptions
from .tasks import Problem


class CodeOracle(Player):
    """Submits the known solution."""

    def __init__(self, **options: JSON) -> None:
        self._options = options

    def begin(self, request: RolloutRequest, start: Reset) -> EpisodePlayer:
        solution = problem_of(request.task, self._options).solution
        if solution is None:
            raise UsageError("Code-v0: the oracle knows no solution, because the rows of this file have none")
        if not start.tools:
            return Script([answer_of(solution)]).begin(request, start)
        command = f"{write_solution(solution)}\npython3 test_examples.py"
        return Script([write_call("bash", command=command), write_call("submit")]).begin(request, start)


class CodeNop(Player):
    """Submits nothing."""

    def __init__(self, **options: JSON) -> None: ...

    def begin(self, request: RolloutRequest, start: Reset) -> EpisodePlayer:
        return Script([write_call("submit") if start.tools else ""]).begin(request, start)


def problem_of(task: Task, options: Options) -> Problem:
    """Return the problem of `task`, in an environment with these options."""
    return override(CodeOptions(), {**options, **task.options}).problem(task.seed)


def answer_of(solution: str) -> str:
    """Return the answer of a language model that submits `solution`."""
    return f"```python\n{solution.rstrip()}\n```"


def write_solution(solution: str) -> str:
    """Return the command of bash that writes the file of the solution."""
    return f"cat > {SOLUTION} <<'END'\n{solution.rstrip()}\nEND"
