"""Play tasks with the oracle, the nop and the cheats, as `envkit tasks ENV check` does, and count what they earn."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from envkit import clock
from envkit.checks.tasks import check_tasks
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

    Returns:
        For each kind of player the numbers of players, episodes and successes; ``problems`` and ``seconds``.
    """
    began = clock.stopwatch()
    results = []
    for again in range(RACES if racy else 1):
        names = [f"cheat:{name}" for name in racy] if again else players
        results += check_tasks(
            env_id, tasks, players=names, repeat=repeat, options=options, backend=backend, split=split
        )[0]
    figures: dict[str, Any] = {}
    for one in results:
        kind = figures.setdefault(one.player.partition(":")[0], {"players": set(), "episodes": 0, "successes": 0})
        kind["players"].add(one.player)
        kind["episodes"] += len(one.episodes)
        kind["successes"] += one.successes
    for kind in figures.values():
        kind["players"] = len(kind["players"])
    problems = [line for one in results for line in one.problems()]
    return {**figures, "problems": problems, "seconds": round(clock.stopwatch() - began, 1)}
