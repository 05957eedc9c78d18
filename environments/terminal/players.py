"""Players of the tasks: the oracle, which plays the solution, and one that does nothing."""

from __future__ import annotations

import base64
import io
import random
import shlex
import tarfile
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from envkit.errors import UsageError
from envkit.protocols import EpisodePlayer
from envkit.types import JSON, Reset, Task, ToolSchema

from ..tools import Script, write_call
from .options import options_of
from .tasks import TerminalTask

_WAIT_S = 50.0


class TerminalOracle:
    """Runs the solution of each step, by commands in the agent's sandbox; see `envkit.protocols.Player`."""

    def __init__(self, **options: JSON) -> None:
        self._options = options

    def begin(self, task: Task, start: Reset, rng: random.Random) -> EpisodePlayer:
        actions: list[str] = []
        with TemporaryDirectory(prefix="envkit-task-") as scratch:
            found = task_of(task, self._options, Path(scratch))
            for step in found.steps:
                if step.solution is None:
                    raise UsageError(f"Terminal-v0: the oracle knows no solution of {found.name}, because it has none")
                actions += [call(start, solve_command(found, step.solution)), write_call("submit")]
        return Script(actions).begin(task, start, rng)


class TerminalNop:
    """Submits each step without work; see `envkit.protocols.Player`."""

    def __init__(self, **options: JSON) -> None: ...

    def begin(self, task: Task, start: Reset, rng: random.Random) -> EpisodePlayer:
        return Script([write_call("submit")]).begin(task, start, rng)


def task_of(task: Task, options: Mapping[str, JSON], scratch: Path) -> TerminalTask:
    """Return the task of an episode, in an environment with these options; see `TerminalOptions.task`."""
    return options_of({**options, **task.options}).task(task.seed, scratch)


def call(start: Reset, command: str) -> str:
    """Return the action that runs a command, with the tools of an episode."""
    tools: tuple[ToolSchema, ...] = tuple(start.tools)
    if any(tool["function"]["name"] == "bash" for tool in tools):
        return write_call("bash", command=command)
    return write_call("send_keys", keys=[command, "Enter"], wait_s=_WAIT_S)


def solve_command(task: TerminalTask, solution: Path) -> str:
    """Return a command that copies a folder with ``solve.sh`` into the sandbox, runs the script and removes the folder.

    The folder is ``/solution`` where it can be made, as in Harbor, otherwise a folder in ``/tmp``.
    """
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as tar:
        for path in sorted(solution.iterdir()):
            tar.add(path, path.name)
    text = base64.b64encode(content.getvalue()).decode()
    env = " ".join(f"{name}={shlex.quote(value)}" for name, value in task.solution_env.items())
    return (
        "S=/solution; mkdir -p $S 2>/dev/null || { S=/tmp/solution; mkdir -p $S; }; "
        f"echo {text} | base64 -d | tar -xzf - -C $S --no-same-owner; {env} bash $S/solve.sh; rm -rf $S"
    )
