"""Checks tasks by playing them with the players of their environment.

The nop must not succeed, the oracle must always succeed, and cheats must earn nothing.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Annotated

import typer

from envkit import clock
from envkit.checks.recorded import NO_SUCCESS
from envkit.environments.tasks import OwnCheats
from envkit.errors import EnvError, UsageError, did_you_mean
from envkit.protocols import EnvHost, Episode, EpisodePlayer, Player
from envkit.registry import EnvSpec
from envkit.runs.display import Display, SilentDisplay
from envkit.trainer_bridge.rollout import RolloutLimits
from envkit.trainer_bridge.scheduler import Rollout
from envkit.types import JSON, CommandResult, Options, Outcome, Reset, RolloutRequest, Task, stable_hash
from envkit.wiring import tasks as task_sets
from envkit.wiring.environments import find, open_resources, slots
from envkit.wiring.evaluation.policies import NOP, player_of

EXPECTED: Mapping[str, str] = {"nop": "must fail", "oracle": "must succeed", "cheat": "must earn 0"}
"""What each kind of player must do. The kind of ``cheat:NAME`` is ``cheat``."""

_LIMITS = RolloutLimits(max_turns=1000, player_timeout_s=300.0, episode_timeout_s=900.0, grade_timeout_s=600.0)
_LOG_LINES = 10


@dataclass(frozen=True, slots=True)
class TaskEpisode:
    """One episode of a player in a task.

    Attributes:
        task: Name of the task, or its index if it has no name.
        outcome: How it ended.
        cheat: Name of the cheat, if it is one of the task's own.
        printed: Last lines that the player saw, such as those that the solution printed.
        is_playable: Whether the task can be played here: whether any player could begin an episode of it.
    """

    task: str
    outcome: Outcome
    cheat: str = ""
    printed: str = ""
    is_playable: bool = True


@dataclass(frozen=True, slots=True)
class PlayerResult:
    """The episodes of a player, in the order of the tasks."""

    player: str
    episodes: Sequence[TaskEpisode]

    @property
    def successes(self) -> int:
        return sum(one.outcome.success is True for one in self.episodes)

    @property
    def played(self) -> int:
        """Number of episodes of tasks that can be played here."""
        return sum(one.is_playable for one in self.episodes)

    @property
    def verdict(self) -> str:
        """``ok``, ``fail``, or ``void`` if it only could not be played in some tasks or episodes."""
        bad = [one.outcome for one in self.episodes if one.is_playable and not self._is_ok(one)]
        if bad:
            return "void" if all(one.is_void for one in bad) else "fail"
        return "ok" if self.played else "void"

    @property
    def failed(self) -> Sequence[str]:
        """The tasks that can be played and in which the player did not do what it must."""
        return list(dict.fromkeys(one.task for one in self.episodes if one.is_playable and not self._is_ok(one)))

    def problems(self) -> Sequence[str]:
        """Return a text for each of the tasks in `failed`, with the end of what the solution and the grader printed."""
        kind, texts = _kind(self.player), []
        for task in self.failed:
            played = [one for one in self.episodes if one.task == task]
            bad = [one for one in played if not self._is_ok(one)]
            one = next((one for one in bad if one.outcome.is_void), bad[0])
            must = "was not checked" if all(one.outcome.is_void for one in bad) else EXPECTED[kind]
            count = f"{len(bad)} of {len(played)}{one.cheat and f', such as {one.cheat}'}"
            lines = [f"{self.player} {must}: task {task}: {count}: {_shown(one.outcome)}"]
            printed = one.printed if kind == "oracle" and not one.outcome.is_void else ""
            log = _last_lines([one.outcome.grader_output])
            for title, end in (("the solution printed", printed), ("the grader printed", log)):
                lines += [f"  {title}:", *(f"    {line}" for line in end.splitlines())] if end else []
            texts.append("\n".join(lines))
        return texts

    def _is_ok(self, episode: TaskEpisode) -> bool:
        kind, outcome = _kind(self.player), episode.outcome
        if outcome.reward is None:
            return False
        if kind == "cheat":
            return outcome.reward <= 0 and outcome.success is not True
        return outcome.success is (kind == "oracle")


def unplayable(results: Sequence[PlayerResult]) -> Sequence[str]:
    """Return a line for each task that cannot be played here, with the reason."""
    why = {one.task: one.outcome for result in results for one in result.episodes if not one.is_playable}
    return [f"task {task}: {_shown(outcome)}" for task, outcome in why.items()]


def _kind(player: str) -> str:
    return player.partition(":")[0]


def _shown(outcome: Outcome) -> str:
    if outcome.reward is None:
        return f"void: {' '.join((outcome.error or outcome.stop).split())}"
    success = f"unknown: {NO_SUCCESS}" if outcome.success is None else outcome.success
    return f"reward {outcome.reward:g}, success {success}"


def check(
    task: Annotated[
        list[str] | None,
        typer.Argument(metavar="[TASK...]", help="Names of tasks, or their indices; by default the first ones."),
    ] = None,
    count: Annotated[
        int,
        typer.Option(min=0, metavar="COUNT", help="Number of tasks, if no TASK is given; 0 for all of the split."),
    ] = 5,
    split: Annotated[str, typer.Option(metavar="SPLIT", help="Split of the tasks.")] = "eval",
    player: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Only this player: oracle, nop, or cheat for all cheats; repeatable."),
    ] = None,
    repeat: Annotated[int, typer.Option(min=1, metavar="COUNT", help="Episodes of the oracle per task.")] = 20,
    retry: Annotated[
        bool, typer.Option("--retry", help="Play an oracle that failed once more: its tests may measure time.")
    ] = False,
    jobs: Annotated[int, typer.Option(min=1, metavar="COUNT", help="Number of episodes at once.")] = 4,
    tasks: Annotated[int | None, typer.Option(hidden=True, min=0, help="Earlier name of --count.")] = None,
    *,
    spec: EnvSpec,
    options: Options,
    backend: str | None,
    judge: str | None,
    display: Display,
) -> CommandResult:
    """Check tasks by playing them: the nop must fail, the oracle must succeed, and each cheat must earn 0.

    Prints one line per player, and one for each task in which a player did not do what it must, with the end of what
    the solution and the grader printed. A task that cannot be played here is void. In both cases, it exits with 1.
    """
    if tasks is not None:
        display.announce(f"--tasks is now --count {tasks}; the folder of the tasks is --option tasks=DIR")
        count = tasks
    play = partial(
        check_tasks,
        spec.id,
        split=split,
        jobs=jobs,
        options=options,
        backend=backend,
        judge=judge,
        display=display,
    )
    results, missing = play(task or count, players=player or (), repeat=repeat)
    flaky: list[str] = []
    for place, one in enumerate(results if retry else ()):
        if one.player == "oracle" and one.failed:
            (again,), _ = play(one.failed, players=["oracle"], repeat=1)
            kept = [episode for episode in one.episodes if episode.task not in one.failed]
            results[place] = replace(one, episodes=[*kept, *again.episodes])
            flaky += [
                f"task {name} is flaky: the oracle succeeded only in its second attempt"
                for name in one.failed
                if name not in again.failed
            ]
    rows = [(one.player, str(one.played), str(one.successes), one.verdict) for one in results]
    has_cheats = find_spec("envkit_cheats") is not None
    lines = [
        f"{spec.id} has no player {kind}, which {EXPECTED[kind]}" for kind in missing if has_cheats or kind != "cheat"
    ]
    if not has_cheats:
        lines.append('the cheats of envkit were not played: pip install "envkit[cheats]", or in a clone ./cheats')
    problems = [*unplayable(results), *(line for one in results for line in one.problems())]
    table = [("PLAYER", "EPISODES", "SUCCESS", "VERDICT"), *rows]
    return CommandResult([table, *lines, *flaky, *problems], is_ok=not problems)


def check_tasks(
    env_id: str,
    tasks: int | Sequence[int | str] = 5,
    *,
    players: Sequence[str] = (),
    split: str = "eval",
    repeat: int = 20,
    jobs: int = 4,
    options: Mapping[str, JSON] | None = None,
    backend: str | None = None,
    judge: str | None = None,
    display: Display | None = None,
) -> tuple[list[PlayerResult], list[str]]:
    """Play tasks with the nop, the oracle and the cheats of their environment; the arguments are those of `check`.

    If the environment has no player ``nop``, the nop submits, or plays empty actions if there is no tool ``submit``.

    `tasks` are names of tasks, or indices in the split, or the number of its first tasks, where 0 means all; `players`
    are names of players, or ``cheat`` for all cheats, and empty for all players.

    Returns:
        A result for each player, and the names of the kinds of players that the environment lacks.

    Raises:
        UnknownEnvError: No environment has this id.
        OptionError: The environment rejects an option.
        UsageError: There is no such task or split, the environment has no players, or it needs what is missing here.
    """
    spec, chosen, display = find(env_id), dict(options or {}), display or SilentDisplay()
    names = [name for name in spec.players if _kind(name) in EXPECTED]
    if not names:
        raise UsageError(f"{env_id} has no players to check tasks with; register players={{'oracle': ..., 'nop': ...}}")
    if NOP not in names:  # player_of then returns the general one, as in an evaluation
        names.insert(1, NOP)
    missing = [kind for kind in EXPECTED if kind not in map(_kind, names)]
    for one in players:
        if one not in (known := {*names, *map(_kind, names)}):
            raise UsageError(f"{env_id} has no player {one!r}{did_you_mean(one, known)}")
    names = [name for name in names if not players or name in players or _kind(name) in players]
    found = task_sets.select(spec, chosen, split, tasks)
    opened = {name: player_of(name, spec, chosen) for name in names}
    # By task, since a backend may keep a prepared sandbox of the last tasks.
    queue = [
        (task, name, cheat, player)
        for task in found
        for name in names
        for cheat, player in _players(opened[name], found[task], repeat if name == "oracle" else 1)
    ]
    display.phase(f"check {env_id}", len(queue))

    async def main() -> list[PlayerResult]:
        async with (
            open_resources(spec.needs, backend=backend, judge=judge, announce=display.announce) as resources,
            slots(jobs, chosen, resources) as host,
        ):
            resources.arguments(spec)  # raises what is missing here, for any task
            rollout = Rollout(_VoidHost(host), _Queue([player for *_, player in queue]), _LIMITS, jobs)
            result = await rollout.groups(
                [found[task] for task, *_ in queue],
                phase="check",
                seed=stable_hash("check task"),
                on_episode=lambda played: display.advance(),
            )
        begun = {task for (task, *_), one in zip(queue, result.trajectories, strict=True) if one.start is not None}
        episodes: dict[str, list[TaskEpisode]] = {name: [] for name in names}
        for (task, name, cheat, _), one in zip(queue, result.trajectories, strict=True):
            end = _last_lines(turn.step.observation.text for turn in one.turns if turn.step is not None)
            episodes[name].append(TaskEpisode(task, one.outcome, cheat, end, task in begun))
        return [PlayerResult(name, some) for name, some in episodes.items() if some]

    return clock.run_blocking(main), missing


def _players(player: Player, task: Task, repeat: int) -> Iterable[tuple[str, Player]]:
    """Return the players of a task's episodes, each with the name of its cheat if that is one of the task's own."""
    return player.players_of(task).items() if isinstance(player, OwnCheats) else [("", player)] * repeat


@dataclass(frozen=True, slots=True)
class _Queue(Player):
    """Plays each episode with a player of its own."""

    players: Sequence[Player]

    def begin(self, request: RolloutRequest, start: Reset) -> EpisodePlayer:
        return self.players[request.index].begin(request, start)


class _VoidHost(EnvHost):
    """A host whose episodes are void if their task needs what is missing here, so that the other tasks are played."""

    def __init__(self, host: EnvHost) -> None:
        self._host = host

    @property
    def capacity(self) -> int:
        return self._host.capacity

    @asynccontextmanager
    async def lease(self, task: Task) -> AsyncIterator[Episode]:
        try:
            async with self._host.lease(task) as episode:
                yield episode
        except UsageError as error:
            raise EnvError(task.env_id, f"UsageError: {error}") from error


def _last_lines(texts: Iterable[str]) -> str:
    return "\n".join("\n".join(text.rstrip("\n") for text in texts).strip("\n").splitlines()[-_LOG_LINES:])
