"""Players of the programming tasks: the oracle, which knows the solution, and one that does nothing.

They play in both modes: in one answer, or with calls of tools.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

from envkit.errors import UsageError
from envkit.protocols import EpisodePlayer
from envkit.types import JSON, Observation, Options, Reset, Task

from ..options import override
from .task_set import CodeOptions
from .tasks import Problem

SOLUTION = "/workspace/solution.py"


class Script:
    """A player that plays the same actions whatever it observes; see `envkit.protocols.EpisodePlayer`."""

    def __init__(self, actions: Sequence[str]) -> None:
        self._actions = list(actions)

    @property
    def generation(self) -> None:
        return None

    async def act(self, observation: Observation) -> str:
        return self._actions.pop(0) if len(self._actions) > 1 else self._actions[0]


class CodeOracle:
    """Submits the known solution; see `envkit.protocols.Player`."""

    def __init__(self, **options: JSON) -> None:
        self._options = options

    def begin(self, task: Task, start: Reset, rng: random.Random) -> EpisodePlayer:
        solution = problem_of(task, self._options).solution
        if solution is None:
            raise UsageError("Code-v0: the oracle knows no solution, because the rows of this file have none")
        if not start.tools:
            return Script([answer_of(solution)])
        command = f"{write_solution(solution)}\npython3 test_examples.py"
        return Script([call("bash", command=command), call("submit")])


class CodeNop:
    """Submits nothing; see `envkit.protocols.Player`."""

    def __init__(self, **options: JSON) -> None: ...

    def begin(self, task: Task, start: Reset, rng: random.Random) -> EpisodePlayer:
        return Script([call("submit") if start.tools else ""])


def problem_of(task: Task, options: Options) -> Problem:
    """Return the problem of `task`, in an environment with these options."""
    return override(CodeOptions(), {**options, **task.options}).problem(task.seed)


def answer_of(solution: str) -> str:
    """Return the answer of a language model that submits `solution`."""
    return f"```python\n{solution.rstrip()}\n```"


def call(tool: str, **arguments: JSON) -> str:
    """Return the action that calls a tool."""
    return json.dumps({"name": tool, "arguments": arguments})


def write_solution(solution: str) -> str:
    """Return the command of bash that writes the file of the solution."""
    return f"cat > {SOLUTION} <<'END'\n{solution.rstrip()}\nEND"
