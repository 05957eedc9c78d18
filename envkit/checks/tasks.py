"""Checks tasks by playing them with the players of their environment.

The nop must not succeed, the oracle must always succeed, and cheats must earn nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp

from envkit import clock, registry
from envkit.checks.recorded import NO_SUCCESS
from envkit.errors import UsageError
from envkit.protocols import EnvHost
from envkit.registry import EnvSpec
from envkit.trainer_bridge.rollout import Rollout, RolloutLimits
from envkit.types import JSON, Options, Outcome, Task, stable_hash
from envkit.wiring import tasks as task_sets
from envkit.wiring.environments import find, open_resources, slots
from envkit.wiring.evaluation.policies import NOP, own_player

EXPECTED: Mapping[str, str] = {"nop": "must fail", "oracle": "must succeed", "cheat": "must earn 0"}
"""What each kind of player must do. The kind of ``cheat:NAME`` is ``cheat``."""

_LIMITS = RolloutLimits(max_turns=1000, episode_timeout_s=900.0, grade_timeout_s=600.0)
_AT_ONCE = 4
_LOG_LINES = 10


@dataclass(frozen=True, slots=True)
class TaskEpisode:
    """One episode of a player.

    Attributes:
        index: Index of the task.
        outcome: How it ended.
        log: The last lines of the grader's output, if the environment has the option ``logs`` and it was not set.
    """

    index: int
    outcome: Outcome
    log: str = ""


@dataclass(frozen=True, slots=True)
class PlayerResult:
    """What a player did in all tasks.

    Attributes:
        player: Name of the player.
        episodes: Its episodes, in the order of the tasks.
    """

    player: str
    episodes: Sequence[TaskEpisode]

    @property
    def successes(self) -> int:
        return sum(one.outcome.success is True for one in self.episodes)

    def problems(self) -> Sequence[str]:
        """Return a line, and below it the grader's log, for each task in which the player did not do what it must."""
        kind, lines = _kind(self.player), []
        for index in dict.fromkeys(one.index for one in self.episodes):
            played = [one for one in self.episodes if one.index == index]
            bad = [one for one in played if not _is_as_expected(kind, one.outcome)]
            if bad:
                one = next((one for one in bad if one.outcome.is_void), bad[0])
                seen = "\n    ".join([_shown(one.outcome), *one.log.splitlines()])
                lines.append(f"{self.player} {EXPECTED[kind]}: task {index}: {len(bad)} of {len(played)}: {seen}")
        return lines


def _kind(player: str) -> str:
    return player.partition(":")[0]


def _is_as_expected(kind: str, outcome: Outcome) -> bool:
    if outcome.reward is None:
        return False
    if kind == "cheat":
        return outcome.reward <= 0 and outcome.success is not True
    return outcome.success is (kind == "oracle")


def _shown(outcome: Outcome) -> str:
    if outcome.reward is None:
        return f"void: {outcome.error}"
    success = f"unknown: {NO_SUCCESS}" if outcome.success is None else outcome.success
    return f"reward {outcome.reward:g}, success {success}"


def check_tasks(
    env_id: str,
    indices: Sequence[int] | None = None,
    *,
    tasks: int = 5,
    split: str = "eval",
    repeat: int = 20,
    options: Mapping[str, JSON] | None = None,
    backend: str | None = None,
    judge: str | None = None,
    announce: Callable[[str], None] | None = None,
    on_begin: Callable[[int], None] = lambda count: None,
    on_episode: Callable[[str], None] = lambda player: None,
) -> tuple[list[PlayerResult], list[str]]:
    """Play tasks with the nop, the oracle and the cheats of their environment.

    If the environment has no player ``nop``, the nop plays an empty action in each turn.

    Args:
        env_id: Registered environment.
        indices: Indices of the tasks in the split; None means the first `tasks`.
        tasks: Number of tasks.
        split: Split of the tasks, if the environment has splits.
        repeat: Episodes of the oracle per task, to find tasks that it solves only sometimes.
        options: Options of the environment.
        backend: Kind of the sandboxes, if the environment needs sandboxes; None means ``"auto"``.
        judge: ``MODEL@URL`` of the judge, if the environment needs one.
        announce: Called with one line that names the backend, if the environment needs sandboxes.
        on_begin: Called once with the number of episodes.
        on_episode: Called with the name of the player after each episode.

    Returns:
        A result for each player, and the names of the kinds of players that the environment lacks.

    Raises:
        UnknownEnvError: No environment has this id.
        OptionError: The environment rejects an option.
        UsageError: There is no such task or split, the environment has no players, or it needs what is missing here.
    """
    spec = find(env_id)
    chosen = dict(options or {})
    names = [name for name in spec.players if _kind(name) in EXPECTED]
    if not names:
        raise UsageError(f"{env_id} has no players to check tasks with; register players={{'oracle': ..., 'nop': ...}}")
    if NOP not in names:  # own_player then returns the general one, as in an evaluation
        names.append(NOP)
    players = {name: own_player(name, spec, chosen) for name in names}
    missing = [kind for kind in EXPECTED if kind not in map(_kind, names)]
    found = _tasks(spec, split, indices, tasks, chosen)
    repeats = {name: repeat if name == "oracle" else 1 for name in names}
    on_begin(sum(repeats.values()) * len(found))
    defaults = getattr(registry.load(spec.entry_point), "options", {})
    has_logs = "logs" in defaults and isinstance(defaults["logs"], str | None)

    def with_logs(task: Task, folder: Path) -> Task:
        is_kept = has_logs and not {**chosen, **task.options}.get("logs")
        return replace(task, options={**task.options, "logs": str(folder)}) if is_kept else task

    async def play_all(host: EnvHost, name: str) -> PlayerResult:
        with TemporaryDirectory(prefix="envkit-logs-") as folder:
            numbers = [index for index in found for _ in range(repeats[name])]
            logs = [Path(mkdtemp(dir=folder)) for _ in numbers]
            result = await Rollout(host, players[name], _LIMITS, _AT_ONCE).groups(
                [with_logs(found[index], log) for index, log in zip(numbers, logs, strict=True)],
                phase=name,
                seed=stable_hash("check task", name),
                on_episode=lambda played: on_episode(name),
            )
            rows = zip(numbers, result.trajectories, logs, strict=True)
            return PlayerResult(name, [TaskEpisode(index, one.outcome, _end_of(log)) for index, one, log in rows])

    async def main() -> list[PlayerResult]:
        async with (
            open_resources(spec.needs, backend=backend, judge=judge, announce=announce) as resources,
            slots(_AT_ONCE, chosen, resources) as host,
        ):
            return [await play_all(host, name) for name in names]

    return clock.run_blocking(main), missing


def _tasks(
    spec: EnvSpec, split: str, indices: Sequence[int] | None, count: int, options: Options
) -> Mapping[int, Task]:
    """Return the tasks to play, by their indices."""
    if spec.task_set is None:
        if spec.splits and split not in spec.splits:
            raise UsageError(f"--split: {spec.id} has no split {split!r}; it has {', '.join(spec.splits)}")
        more = {"split": split} if spec.splits else {}
        return {index: Task(spec.id, index, {**options, **more}) for index in indices or range(count)}
    task_set = task_sets.task_set(spec, options)
    assert task_set is not None
    if split not in task_set.splits:
        raise UsageError(f"--split: {spec.id} has no split {split!r}; it has {', '.join(task_set.splits)}")
    size = task_set.count(split)
    last = math.inf if size is None else size
    for index in indices or ():
        if index >= last:
            raise UsageError(f"{spec.id} has {size} tasks in the split {split}, so there is no task {index}")
    return {index: task_set.task(split, index) for index in indices or range(min(count, size or count))}


def _end_of(logs: Path) -> str:
    """Return the last lines of the regular files in a folder, the newest file last."""
    files = sorted(filter(Path.is_file, logs.iterdir()), key=lambda path: path.stat().st_mtime_ns)
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in files]
    return "\n".join("".join(texts).splitlines()[-_LOG_LINES:])
