"""Rewards of recorded episodes, computed again: `rescore` repeats their actions in the environments of today."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import msgspec

from envkit.errors import UsageError
from envkit.protocols import EnvHost
from envkit.runs.display import Display
from envkit.runs.episodes import episode_of
from envkit.types import EpisodeRecord, Observation, Options, Task

from ..rollout import RolloutLimits
from ..rollout.players import ScriptedPlayer
from ..scheduler import Rollout

_LIMITS = RolloutLimits(max_turns=sys.maxsize, player_timeout_s=300.0, grade_timeout_s=600.0)


@dataclass(frozen=True, slots=True)
class Rescored:
    """An episode, as it was recorded and as it was repeated. If `after` is void, the repetition failed."""

    before: EpisodeRecord
    after: EpisodeRecord

    @property
    def is_changed(self) -> bool:
        """Whether the reward or the success differs."""
        after, before = self.after.outcome, self.before.outcome
        return not after.is_void and (after.reward, after.success) != (before.reward, before.success)

    @property
    def differs_at(self) -> int | None:
        """The first turn, from 1, whose action led to another observation; 0 for the reset; None if all are equal."""
        pairs = zip(_observations(self.before), _observations(self.after), strict=False)
        return next((turn for turn, (one, other) in enumerate(pairs) if one != other), None)


def _observations(episode: EpisodeRecord) -> Iterator[Observation | None]:
    yield episode.start
    yield from (turn.observation for turn in episode.turns)


def repeatable(episodes: Sequence[EpisodeRecord]) -> list[EpisodeRecord]:
    """Return the episodes that are not void.

    Raises:
        UsageError: All episodes are void, or they are of several environments.
    """
    scored = [one for one in episodes if not one.outcome.is_void]
    ids = sorted({one.env_id for one in scored})
    if len(ids) != 1:
        found = f"of several environments ({', '.join(ids)})" if ids else "void, so there is nothing to repeat"
        raise UsageError(f"the recorded episodes are {found}; use the file of a run with one environment")
    return scored


async def rescore(
    host: EnvHost, episodes: Sequence[EpisodeRecord], *, options: Options, num_envs: int, display: Display
) -> list[Rescored]:
    """Repeat the actions of `episodes` and return both versions of each, in order.

    `options` override those of the recorded tasks; up to `num_envs` episodes are played at once.
    """
    display.phase("rescore", len(episodes))
    tasks = [Task(one.env_id, one.seed, {**one.options, **options}) for one in episodes]
    player = ScriptedPlayer([[turn.action for turn in one.turns] for one in episodes])
    result = await Rollout(host, player, _LIMITS, num_envs).groups(
        tasks, phase="rescore", seed=0, on_episode=lambda played: display.advance(1)
    )
    repeated = [episode_of(played, index=0, decode=str) for played in result.trajectories]
    return [
        Rescored(before, msgspec.structs.replace(after, index=before.index, member=before.member))
        for before, after in zip(episodes, repeated, strict=True)
    ]


def totals(found: Sequence[Rescored]) -> Mapping[str, tuple[float, float]]:
    """Return the mean reward and success, before and after, over the episodes in which both are known."""
    means = {}
    for name in ("success", "reward"):
        pairs = [(getattr(one.before.outcome, name), getattr(one.after.outcome, name)) for one in found]
        if known := [pair for pair in pairs if None not in pair]:
            means[name] = (fmean(one for one, _ in known), fmean(one for _, one in known))
    return means
