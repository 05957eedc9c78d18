"""The result of an evaluation, and its form as JSON."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

from envkit.errors import EnvkitError
from envkit.types import JSON, Task

from .outcomes import ENDINGS, EvaluatedEpisode, Tally, TokenUsage, measure, total_usage
from .statistics import Estimate, Stratum, strata

FORMAT = 2
"""Version of the format of ``evaluation.json``."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Result of an evaluation.

    Attributes:
        seed: Seed of the tasks and of the policy's sampling.
        episodes: Number of finished episodes. Only these count in `metrics`, `levels` and `usage`.
        endings: Number of episodes by ending; see `outcomes.ENDINGS`.
        void_by_cause: Number of void episodes by their stop reason.
        void_by_agent: Number of void episodes whose sandbox ended because of a program in it (`Cause.by_agent`).
        metrics: ``"success"``, if it is known, and what `outcomes.measure` adds to it. ``"return"``, the sum of an
            episode's rewards. ``"turns"``. The environment's own metrics, aggregated over each episode. See
            `statistics.estimate` for the intervals.
        levels: One entry per task whose shortest solution is known: the number of moves of that solution, and whether
            each episode of the task succeeded. Empty if success is unknown.
        success_rule: How success is defined, in words.
        seconds: Duration in seconds; if the evaluation was interrupted and resumed, only since then.
        env_seconds_per_episode: Mean seconds that the environment and its tools took for the steps.
        player_seconds_per_episode: Mean seconds that a language model took, with its waits for an engine; 0 for other
            players, whose time is not measured.
        error: Why one of the void episodes was lost; None without void episodes.
        resumed: Number of episodes that were finished before the evaluation was interrupted and resumed.
        usage: Token counts of a language model, with those of the `resumed` episodes; zeros for other players.
        notes: What users should know, one line each: tasks that were left out, parameters that an endpoint refused,
            requests that were repeated, and the warnings of `advice`.
        retries: Number of requests to an endpoint that repeated one that had failed temporarily; as `seconds`, only
            since the evaluation was resumed.
        versions: Versions of the environment's rules and data that its resets report as ``info["versions"]``.
        task_set: Hash of the tasks and `versions`. Results are comparable only if it is equal.
        settings: The configuration of the evaluation, and the versions of what ran it.
    """

    env_id: str
    policy: str
    seed: int
    options: Mapping[str, JSON]
    attempts: int
    episodes: int
    endings: Mapping[str, int]
    void_by_cause: Mapping[str, int]
    void_by_agent: int
    metrics: Mapping[str, Estimate]
    levels: Sequence[tuple[int, Sequence[bool]]]
    success_rule: str
    seconds: float
    env_seconds_per_episode: float
    player_seconds_per_episode: float
    error: str | None
    resumed: int
    usage: TokenUsage
    notes: Sequence[str]
    retries: int
    versions: Mapping[str, JSON]
    task_set: str
    settings: Mapping[str, JSON]

    @classmethod
    def of(cls, tally: Tally, tasks: Sequence[Task], *, attempts: int, **values: Any) -> Self:
        """Return the result of an evaluation; `values` are the fields that do not follow from its episodes.

        Raises:
            EnvkitError: No episode finished.
        """
        by_task = tally.by_task
        every = [one for task in by_task for one in task]
        played = [one for one in every if not one.outcome.is_void]
        void = [one.outcome for one in every if one.outcome.is_void]
        if not played:
            env_id = values["env_id"]
            raise EnvkitError(f"0 of {tally.total} episodes of {env_id} finished; the first error: {void[0].error}")
        counts, usage = Counter(one.ending for one in every), total_usage(by_task)
        return cls(
            attempts=attempts,
            episodes=len(played),
            endings={name: counts[name] for name in ENDINGS if counts[name]},
            void_by_cause=dict(Counter(one.stop.value for one in void)),
            void_by_agent=sum(one.cause is not None and one.cause.by_agent for one in void),
            metrics=measure(by_task, attempts),
            levels=list(_levels(by_task)),
            success_rule=tally.success_rule,
            env_seconds_per_episode=sum(one.env_s for one in played) / len(played),
            player_seconds_per_episode=usage.seconds / len(played),
            error=void[0].error if void else None,
            usage=usage,
            versions=tally.versions,
            task_set=task_set_hash(tasks, tally.versions),
            **values,
        )

    @property
    def void(self) -> int:
        """Number of episodes that could not finish, because the environment, its sandbox or an endpoint failed."""
        return self.endings.get("void", 0)

    def by_difficulty(self, *, most: int | None = None) -> list[Stratum]:
        """Return the success rate by length of the shortest solution; see `statistics.strata`."""
        return strata(self.levels, most=most)

    def as_json(self) -> dict[str, JSON]:
        """Return the result as JSON data, with each estimate as ``{"mean": m, "low": l, "high": h}``."""
        total = self.episodes + self.void
        names = ("shortest", "episodes", "successes")
        found: dict[str, Any] = {"format": FORMAT, "void": self.void}
        found |= {one.name: getattr(self, one.name) for one in fields(self) if one.name not in ("levels", "resumed")}
        return found | {
            "endings": {name: {"episodes": count, "share": count / total} for name, count in self.endings.items()},
            "metrics": {name: one._asdict() for name, one in self.metrics.items()},
            "by_difficulty": [
                {**{name: getattr(one, name) for name in names}, "success": one.success._asdict()}
                for one in self.by_difficulty()
            ],
            "usage": self.usage._asdict(),
        }


def task_set_hash(tasks: Iterable[Task], versions: Mapping[str, JSON]) -> str:
    """Return a hash of a set of tasks, played with these versions of the environment, as 16 hexadecimal digits."""
    content = json.dumps([sorted(task.key for task in tasks), dict(versions)], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def _levels(tasks: Sequence[Sequence[EvaluatedEpisode]]) -> Iterator[tuple[int, Sequence[bool]]]:
    for task in tasks:
        solved = [one.outcome.success for one in task if one.outcome.success is not None]
        length = next((one.shortest for one in task if one.shortest is not None), None)
        if length is not None and solved:
            yield length, solved
