"""Players of tasks that do not read observations: the known solution, no work at all, and cheats.

They carry out a `Plan` with the tools of an episode: a shell, the keys of a terminal, or one answer.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from shlex import quote
from typing import Any

from envkit.errors import UsageError
from envkit.protocols import EpisodePlayer, Player
from envkit.types import Observation, Options, Reset, RolloutRequest, Task

from ..tools import write_call
from .task import Plan, SandboxTask

_MAX_COMMAND = 500_000
"""Maximum characters of a command, as the shells of sandboxes accept 1 MiB with all that is around it."""
_MAX_KEYS = 60_000
"""Maximum characters of a command that is typed."""
_WAIT_S = 50.0
_END = "END"
_LONG_COMMAND = "/tmp/command.sh"


class Script(Player):
    """Plays the same actions in every episode, whatever it observes.

    After the last action, it repeats it. For actions that depend on the task, see `Oracle`.
    """

    def __init__(self, actions: Sequence[str]) -> None:
        if not actions:
            raise ValueError("a script needs at least one action")
        self._actions = tuple(actions)

    def begin(self, request: RolloutRequest, start: Reset) -> EpisodePlayer:
        return _Reading(self._actions)


class _Reading(EpisodePlayer):
    def __init__(self, actions: Sequence[str]) -> None:
        self._left = list(actions)

    async def act(self, observation: Observation) -> str:
        return self._left.pop(0) if len(self._left) > 1 else self._left[0]


@dataclass(frozen=True, slots=True)
class Oracle(Player):
    """Plays actions that depend on the task, whatever it observes later. After the last action, it repeats it.

    Attributes:
        solve: Returns the actions for a task and the start of its episode, at least one.
    """

    solve: Callable[[Task, Reset], Sequence[str]]

    def begin(self, request: RolloutRequest, start: Reset) -> EpisodePlayer:
        return Script(self.solve(request.task, start)).begin(request, start)


class Nop(Player):
    """Does nothing: it submits if there is a tool for it, otherwise its actions are empty."""

    def begin(self, request: RolloutRequest, start: Reset) -> EpisodePlayer:
        can_submit = any(tool["function"]["name"] == "submit" for tool in start.tools)
        return Script([write_call("submit") if can_submit else ""]).begin(request, start)


@dataclass(frozen=True, slots=True)
class PlanPlayer(Player):
    """Carries out a plan and submits the work; so also in the tasks that follow, see `SandboxTask.later`.

    Attributes:
        task_of: Returns the task of an episode; see `TaskEnv.task_of`.
        options: Options of the environment; those of an episode's task override them. One is ``max_turns``.
        plan_of: Returns the plan for a task.

    Raises:
        UsageError: From `begin`: there is no plan for this task, or it needs more turns than the episode has.
    """

    task_of: Callable[[int, Options], SandboxTask[Any]]
    options: Options
    plan_of: Callable[[SandboxTask[Any]], Plan]

    def begin(self, request: RolloutRequest, start: Reset) -> EpisodePlayer:
        options = {**self.options, **request.task.options}
        task = self.task_of(request.task.seed, options)
        actions = [action for one in (task, *task.later) for action in actions_of(one, self.plan_of(one), start)]
        turns: Any = options["max_turns"]
        if len(actions) - 1 > turns:  # the last one is the submission
            needs = f"the player needs {len(actions)} turns for {task.name}"
            raise UsageError(f"{request.task.env_id}: {needs}; raise max_turns, which is {turns}")
        return Script(actions).begin(request, start)


def solution_of(task: SandboxTask[Any]) -> Plan:
    """Return the plan of the oracle.

    Raises:
        UsageError: No solution is known.
    """
    if (plan := task.solution) is None:
        raise UsageError(f"the oracle knows no solution of {task.name or 'this task'}")
    return plan


@dataclass(frozen=True, slots=True)
class OwnCheats(Player):
    """Plays the tasks' own cheats; see `PlanPlayer` for the attributes. Members of a group play them in turn.

    Raises:
        UsageError: From `begin`: the task has no cheats.
    """

    task_of: Callable[[int, Options], SandboxTask[Any]]
    options: Options

    def players_of(self, task: Task) -> Mapping[str, Player]:
        """Return a player of each cheat of a task by name."""
        names = sorted(self.task_of(task.seed, {**self.options, **task.options}).cheats)
        return {name: PlanPlayer(self.task_of, self.options, partial(_own_cheat, name=name)) for name in names}

    def begin(self, request: RolloutRequest, start: Reset) -> EpisodePlayer:
        players = [*self.players_of(request.task).values()]
        if not players:
            raise UsageError(f"{request.task.env_id}: this task has no cheats of its own")
        return players[request.member % len(players)].begin(request, start)


def _own_cheat(task: SandboxTask[Any], name: str) -> Plan:
    return task.cheats[name]


@dataclass(frozen=True, slots=True)
class Cheat:
    """A cheat: it tries to earn a reward without solving the task, and must earn 0.

    `SandboxTask.words` of the task are replaced in all its texts.

    Attributes:
        summary: What it does, in one sentence.
        source: Source code that it submits; see `SandboxTask.with_source`.
        commands: Commands of bash that it runs, after it has written its files.
        files: Files that it writes, by path.
        is_racy: Whether the result may depend on timing, so that one episode proves little.
    """

    summary: str
    source: str = ""
    commands: tuple[str, ...] = ()
    files: tuple[tuple[str, str], ...] = ()
    is_racy: bool = False

    def plan_for(self, task: SandboxTask[Any]) -> Plan:
        """Return what the cheat does in a task."""

        def filled(text: str) -> str:
            for word, value in task.words.items():
                text = text.replace(word, value)
            return text

        source = task.with_source(filled(self.source)) if self.source else Plan()
        files = {filled(path): filled(content).encode() for path, content in self.files}
        return Plan([*source.commands, *map(filled, self.commands)], {**files, **source.files})


def actions_of(task: SandboxTask[Any], plan: Plan, start: Reset) -> list[str]:
    """Return the actions that carry out a plan and submit the work, with the tools of an episode.

    Raises:
        UsageError: The episode has no tools, and the plan is too large for one answer.
    """
    if not start.tools:
        answer = task.answer(plan, list(_commands(plan, limit=_MAX_COMMAND)))
        if len(answer) > _MAX_COMMAND:
            raise UsageError(f"{task.name}: an answer of {len(answer):,} characters is too large; play with tools")
        return [answer]
    if any(tool["function"]["name"] == "bash" for tool in start.tools):
        calls = [write_call("bash", command=one) for one in _commands(plan, limit=_MAX_COMMAND)]
    else:
        typed = _commands(plan, limit=_MAX_KEYS)
        calls = [write_call("type_keys", keys=[one, "Enter"], wait_s=_WAIT_S) for one in typed]
    return [*calls, write_call("submit")]


def _commands(plan: Plan, limit: int) -> Iterator[str]:
    """Yield the commands of bash that carry out a plan, each with at most about `limit` characters."""
    for path, content in plan.files.items():
        yield from write_commands(path, content, limit)
    for command in plan.commands:
        if len(command) > limit:
            yield from write_commands(_LONG_COMMAND, command.encode(), limit)
            command = f". {_LONG_COMMAND}"
        yield command


def write_commands(path: str, content: bytes, limit: int = _MAX_COMMAND) -> Iterator[str]:
    """Yield commands of bash that write a file, in pieces of at most about `limit` characters."""
    text, path = content.decode(errors="replace"), quote(path)
    is_text = text.encode() == content and text.endswith("\n") and "\0" not in text
    if is_text and len(text) <= limit and _END not in text.splitlines():
        yield f"cat > {path} <<'{_END}'\n{text}{_END}"
        return
    encoded = base64.b64encode(content).decode()
    for start in range(0, max(1, len(encoded)), limit):
        yield f"echo {encoded[start : start + limit]} {'>>' if start else '>'} {path}.base64"
    yield f"base64 -d {path}.base64 > {path}; rm {path}.base64"
