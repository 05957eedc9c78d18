"""Players of the tasks: the oracle, which plays the solution, and one that does nothing."""

from __future__ import annotations

import base64
import io
import re
import shlex
import tarfile
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from envkit.errors import UsageError
from envkit.protocols import EpisodePlayer, Player
from envkit.types import JSON, Reset, RolloutRequest, Task

from ..tools import Script, write_call
from .options import options_of
from .tasks import TerminalTask

_CHANGES_SHELL = re.compile(r"\b(exit|set|exec|trap|shopt|cd|return|BASH_SOURCE)\b|\$0")
_WAIT_S = 50.0


class TerminalOracle(Player):
    """Runs the solution of each step, by commands in the agent's sandbox."""

    def __init__(self, **options: JSON) -> None:
        self._options = options

    def begin(self, request: RolloutRequest, start: Reset) -> EpisodePlayer:
        actions: list[str] = []
        with TemporaryDirectory(prefix="envkit-task-") as scratch:
            found = task_of(request.task, self._options, Path(scratch))
            for step in found.steps:
                if step.solution is None:
                    raise UsageError(f"Terminal-v0: the oracle cannot play {found.name}: the task has no solution")
                actions += [call(start, solve_command(found, step.solution)), *submission(start)]
        return Script(actions).begin(request, start)


class TerminalNop(Player):
    """Submits each step without work."""

    def __init__(self, **options: JSON) -> None: ...

    def begin(self, request: RolloutRequest, start: Reset) -> EpisodePlayer:
        return Script(submission(start) or [answer_of(":")]).begin(request, start)


def task_of(task: Task, options: Mapping[str, JSON], scratch: Path) -> TerminalTask:
    """Return the task of an episode, in an environment with these options; see `TerminalOptions.task`."""
    return options_of({**options, **task.options}).task(task.seed, scratch)


def call(start: Reset, command: str) -> str:
    """Return the action that runs a command, with the tools of an episode."""
    if not start.tools:
        return answer_of(command)
    if any(tool["function"]["name"] == "bash" for tool in start.tools):
        return write_call("bash", command=command)
    return write_call("type_keys", keys=[command, "Enter"], wait_s=_WAIT_S)


def submission(start: Reset) -> list[str]:
    """Return the actions that submit the work, with the tools of an episode."""
    return [write_call("submit")] if start.tools else []


def answer_of(script: str) -> str:
    """Return the answer of a language model that consists of a script."""
    return f"```bash\n{script.rstrip()}\n```"


def solve_command(task: TerminalTask, solution: Path) -> str:
    """Return the command that solves a step.

    If the solution is only a script, without commands that would end or change the agent's shell, it is the script.
    Otherwise the command copies the folder of the solution into the sandbox, runs ``solve.sh``, and removes the folder.
    The folder is ``/solution`` where it can be made, as in Harbor, otherwise a folder in ``/tmp``.
    """
    script = (solution / "solve.sh").read_text(encoding="utf-8")
    if len(list(solution.iterdir())) == 1 and not task.solution_env and not _CHANGES_SHELL.search(script):
        return script.removeprefix("#!/bin/sh\n").removeprefix("#!/bin/bash\n").strip()
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
