"""Play tasks with the oracle, the nop and the cheats, as `envkit tasks ENV check` does, and count what they earn."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from envkit import clock
from envkit.checks.tasks import PlayerResult, check_tasks, unplayable
from envkit.types import JSON

RACES = 5
"""Episodes per task of a cheat whose result may depend on timing."""


def play(
    env_id: str,
    tasks: int | Sequence[int],
    *,
    options: Mapping[str, JSON],
    repeat: int,
    backend: str | None = None,
    players: Sequence[str] = (),
    racy: Collection[str] = (),
    split: str = "eval",
) -> dict[str, Any]:
    """Check tasks; see `check_tasks`. The cheats of `racy` play each task `RACES` times.

    A void episode, such as one whose sandbox did not answer on a busy machine, is played once more, alone.

    Returns:
        For each kind of player the numbers of players, episodes and successes; the number of episodes that were
        ``repeated``, ``problems`` and ``seconds``.
    """

    def checked(tasks: int | Sequence[int | str], players: Sequence[str], repeat: int) -> list[PlayerResult]:
        return check_tasks(
            env_id, tasks, players=players, repeat=repeat, options=options, backend=backend, split=split
        )[0]

    began = clock.stopwatch()
    results = checked(tasks, players, repeat)
    for _ in range(RACES - 1 if racy else 0):
        results += checked(tasks, [f"cheat:{name}" for name in racy], repeat)
    void = [(one.player, each.task) for one in results for each in one.episodes if each.outcome.is_void]
    results = [replace(one, episodes=[each for each in one.episodes if not each.outcome.is_void]) for one in results]
    for player, task in void:
        results += checked([task], [player], 1)
    figures: dict[str, Any] = {}
    for one in results:
        kind = figures.setdefault(one.player.partition(":")[0], {"players": set(), "episodes": 0, "successes": 0})
        kind["players"].add(one.player)
        kind["episodes"] += len(one.episodes)
        kind["successes"] += one.successes
    for kind in figures.values():
        kind["players"] = len(kind["players"])
    problems = [*unplayable(results), *(line for one in results for line in one.problems())]
    seconds = round(clock.stopwatch() - began, 1)
    return {**figures, "repeated": len(void), "problems": problems, "seconds": seconds}
