"""Checks tasks by playing them with the players of their environment.

The nop must not succeed, the oracle must always succeed, and cheats must earn nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp

from envkit import clock, registry
from envkit.checks.recorded import NO_SUCCESS
from envkit.errors import UsageError
from envkit.protocols import EnvHost
from envkit.registry import EnvSpec
from envkit.runs.display import Display, SilentDisplay
from envkit.trainer_bridge.rollout import Rollout, RolloutLimits
from envkit.types import JSON, Options, Outcome, Task, stable_hash
from envkit.wiring import tasks as task_sets
from envkit.wiring.environments import find, open_resources, slots
from envkit.wiring.evaluation.policies import NOP, player_of

EXPECTED: Mapping[str, str] = {"nop": "must fail", "oracle": "must succeed", "cheat": "must earn 0"}
"""What each kind of player must do. The kind of ``cheat:NAME`` is ``cheat``."""

_LIMITS = RolloutLimits(max_turns=1000, episode_timeout_s=900.0, grade_timeout_s=600.0)
_AT_ONCE = 4
_LOG_LINES = 10


@dataclass(frozen=True, slots=True)
class TaskEpisode:
    """One episode of a player in the task `index`.

    `log` has the last lines of the grader's output, if the environment has the option ``logs`` and it was not set.
    """

    index: int
    outcome: Outcome
    log: str = ""


@dataclass(frozen=True, slots=True)
class PlayerResult:
    """The episodes of a player, in the order of the tasks."""

    player: str
    episodes: Sequence[TaskEpisode]

    @property
    def successes(self) -> int:
        return sum(one.outcome.success is True for one in self.episodes)

    @property
    def verdict(self) -> str:
        """``ok``, ``fail``, or ``void`` if it only could not be played in some episodes."""
        bad = [one.outcome for one in self.episodes if not _is_as_expected(_kind(self.player), one.outcome)]
        return "ok" if not bad else "void" if all(one.is_void for one in bad) else "fail"

    def problems(self) -> Sequence[str]:
        """Return a line, and below it the grader's log, for each task in which the player did not do what it must."""
        kind, lines = _kind(self.player), []
        for index in dict.fromkeys(one.index for one in self.episodes):
            played = [one for one in self.episodes if one.index == index]
            bad = [one for one in played if not _is_as_expected(kind, one.outcome)]
            if bad:
                one = next((one for one in bad if one.outcome.is_void), bad[0])
                seen = "\n    ".join([_shown(one.outcome), *one.log.splitlines()])
                must = "was not checked" if all(one.outcome.is_void for one in bad) else EXPECTED[kind]
                lines.append(f"{self.player} {must}: task {index}: {len(bad)} of {len(played)}: {seen}")
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
    tasks: int | Sequence[int] = 5,
    *,
    split: str = "eval",
    repeat: int = 20,
    options: Mapping[str, JSON] | None = None,
    backend: str | None = None,
    judge: str | None = None,
    display: Display | None = None,
) -> tuple[list[PlayerResult], list[str]]:
    """Play tasks with the nop, the oracle and the cheats of their environment.

    If the environment has no player ``nop``, the nop plays an empty action in each turn.

    Args:
        env_id: Registered environment.
        tasks: Indices of the tasks in the split, or the number of its first tasks.
        split: Split of the tasks, if the environment has splits.
        repeat: Episodes of the oracle per task, to find tasks that it solves only sometimes.
        options: Options of the environment.
        backend: Kind of the sandboxes, if the environment needs sandboxes; None means ``"auto"``.
        judge: ``MODEL@URL`` of the judge, if the environment needs one.
        display: Shows the progress, and the backend if the environment needs sandboxes.

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
        names.append(NOP)
    players = {name: player_of(name, spec, chosen) for name in names}
    missing = [kind for kind in EXPECTED if kind not in map(_kind, names)]
    found = _tasks(spec, split, tasks, chosen)
    repeats = {name: repeat if name == "oracle" else 1 for name in names}
    display.phase(f"check {env_id}", sum(repeats.values()) * len(found))
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
                on_episode=lambda played: display.advance(),
            )
            rows = zip(numbers, result.trajectories, logs, strict=True)
            return PlayerResult(name, [TaskEpisode(index, one.outcome, _end_of(log)) for index, one, log in rows])

    async def main() -> list[PlayerResult]:
        async with (
            open_resources(spec.needs, backend=backend, judge=judge, announce=display.announce) as resources,
            slots(_AT_ONCE, chosen, resources) as host,
        ):
            return [await play_all(host, name) for name in names]

    return clock.run_blocking(main), missing


def _tasks(spec: EnvSpec, split: str, tasks: int | Sequence[int], options: Options) -> Mapping[int, Task]:
    """Return the tasks to play, by their indices."""
    task_set, splits = task_sets.task_set(spec, options), task_sets.splits(spec, options)
    if splits and split not in splits:
        raise UsageError(f"--split: {spec.id} has no split {split!r}; it has {', '.join(splits)}")
    indices = range(tasks) if isinstance(tasks, int) else tasks
    if task_set is None:
        more = {"split": split} if splits else {}
        return {index: Task(spec.id, index, {**options, **more}) for index in indices}
    size = task_set.count(split)
    if size is not None and isinstance(tasks, int):
        indices = range(min(tasks, size))
    elif size is not None and max(indices) >= size:
        raise UsageError(f"{spec.id} has {size} tasks in the split {split}, so there is no task {max(indices)}")
    return {index: task_set.task(split, index) for index in indices}


def _end_of(logs: Path) -> str:
    """Return the last lines of the regular files in a folder, the newest file last."""
    files = sorted(filter(Path.is_file, logs.iterdir()), key=lambda path: path.stat().st_mtime_ns)
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in files]
    return "\n".join("".join(texts).splitlines()[-_LOG_LINES:])
