"""Checks tasks by playing them with the players of their environment.

The nop must not succeed, the oracle must always succeed, and cheats must earn nothing.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import anyio

from envkit import clock, registry
from envkit.errors import UsageError, leaves
from envkit.protocols import EnvHost, Player
from envkit.registry import EnvSpec
from envkit.types import JSON, Options, Task, stable_hash
from envkit.wiring import tasks as task_sets
from envkit.wiring.environments import find, open_resources, slots
from envkit.wiring.evaluation.players import NOP, own_player, play_episode

EXPECTED: Mapping[str, str] = {"nop": "must fail", "oracle": "must succeed", "cheat": "must earn 0"}
"""What each kind of player must do. The kind of ``cheat:NAME`` is ``cheat``."""

_EPISODE_S = 900.0
"""Maximum seconds of an episode with its grader."""
_MAX_TURNS = 1000
_AT_ONCE = 4
_LOG_LINES = 10


@dataclass(frozen=True, slots=True)
class PlayedEpisode:
    """The result of one episode.

    Attributes:
        index: Index of the task.
        is_success: Whether the environment or its grader reports success; without such a report, if the reward is 1.
        reward: Sum of all rewards, with that of the grader.
        void: Why the episode does not count; None if it does.
        log: The last lines of the grader's output, if the environment has the option ``logs`` and it was not set.
    """

    index: int
    is_success: bool = False
    reward: float = 0.0
    void: str | None = None
    log: str = ""


@dataclass(slots=True)
class PlayerResult:
    """What a player did in all tasks.

    Attributes:
        player: Name of the player.
        episodes: Its episodes, in the order in which they ended.
    """

    player: str
    episodes: list[PlayedEpisode] = field(default_factory=list)

    @property
    def successes(self) -> int:
        return sum(one.is_success for one in self.episodes)

    def problems(self) -> Sequence[str]:
        """Return a line, and below it the grader's log, for each task in which the player did not do what it must."""
        kind, lines = _kind(self.player), []
        for index in sorted({one.index for one in self.episodes}):
            played = [one for one in self.episodes if one.index == index]
            bad = [one for one in played if one.void is not None or not _is_as_expected(kind, one)]
            if bad:
                one = next((one for one in bad if one.void is not None), bad[0])
                seen = f"void: {one.void}" if one.void else f"reward {one.reward:g}, success {one.is_success}"
                seen += "".join(f"\n    {line}" for line in one.log.splitlines())
                lines.append(f"{self.player} {EXPECTED[kind]}: task {index}: {len(bad)} of {len(played)}: {seen}")
        return lines


def _kind(player: str) -> str:
    return player.partition(":")[0]


def _is_as_expected(kind: str, episode: PlayedEpisode) -> bool:
    if kind == "cheat":
        return episode.reward <= 0 and not episode.is_success
    return episode.is_success == (kind == "oracle")


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
    episodes = [
        (name, index, task, attempt)
        for name in names
        for index, task in found.items()
        for attempt in range(repeat if name == "oracle" else 1)
    ]
    results = {name: PlayerResult(name) for name in names}
    defaults = getattr(registry.load(spec.entry_point), "options", {})
    has_logs = "logs" in defaults and isinstance(defaults["logs"], str | None)
    on_begin(len(episodes))

    async def play_some(host: EnvHost) -> None:
        while episodes:
            name, index, task, attempt = episodes.pop(0)
            rng = random.Random(stable_hash("check task", name, index, attempt))
            with TemporaryDirectory(prefix="envkit-logs-") as logs:
                is_kept = has_logs and not {**chosen, **task.options}.get("logs")
                asked = replace(task, options={**task.options, "logs": logs}) if is_kept else task
                played = await _play(host, players[name], index, asked, rng)
                results[name].episodes.append(replace(played, log=_end_of(Path(logs))))
            on_episode(name)

    async def main() -> None:
        async with (
            open_resources(spec.needs, backend=backend, judge=judge, announce=announce) as resources,
            slots(_AT_ONCE, chosen, resources) as host,
            anyio.create_task_group() as group,
        ):
            for _ in range(_AT_ONCE):
                group.start_soon(play_some, host)

    try:
        clock.run(main)
    except ExceptionGroup as errors:
        raise next(leaves(errors)) from errors
    return list(results.values()), missing


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


async def _play(host: EnvHost, player: Player, index: int, task: Task, rng: random.Random) -> PlayedEpisode:
    try:
        with anyio.fail_after(_EPISODE_S):
            played = await play_episode(player, host, task, rng, index=index, member=0, max_turns=_MAX_TURNS)
    except TimeoutError:
        return PlayedEpisode(index, void=f"the episode did not end within {_EPISODE_S:g} s")
    if not played.valid:
        return PlayedEpisode(index, void=played.error or str(played.stop))
    reward = played.reward or 0.0
    return PlayedEpisode(index, (played.metrics.get("success", float(reward >= 1)) or 0.0) >= 1, reward)
