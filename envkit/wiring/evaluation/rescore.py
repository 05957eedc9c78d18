"""Rewards of recorded episodes, computed again: `rescore` repeats their actions in the environments of today."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean

import anyio

from envkit.errors import UsageError, leaves
from envkit.protocols import EnvHost
from envkit.runs.display import Display
from envkit.types import EpisodeRecord, Observation, Options, Reset, Task
from envkit.wiring.environments import find, open_resources, slots
from envkit.wiring.evaluation.players import play_episode

_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Rescored:
    """An episode, as it was recorded and as it was repeated.

    Attributes:
        before: The recorded episode.
        after: The repeated episode. If it is not valid, the repetition failed.
    """

    before: EpisodeRecord
    after: EpisodeRecord

    @property
    def is_changed(self) -> bool:
        """Whether the reward or the success differs."""
        after, before = self.after, self.before
        return after.valid and (after.reward, after.succeeded) != (before.reward, before.succeeded)

    @property
    def differs_at(self) -> int | None:
        """The first turn, from 1, whose action led to another observation; 0 for the reset; None if all are equal."""
        pairs = zip(_observations(self.before), _observations(self.after), strict=False)
        return next((turn for turn, (one, other) in enumerate(pairs) if one != other), None)


def _observations(episode: EpisodeRecord) -> Iterator[Observation | None]:
    yield episode.start
    yield from (turn.observation for turn in episode.turns)


@dataclass(slots=True)
class _Repeats:
    """A player that repeats the actions of a recorded episode; see `envkit.protocols.Player`."""

    actions: Iterator[str]
    generation: None = field(default=None, init=False)

    def begin(self, task: Task, start: Reset, rng: random.Random) -> _Repeats:
        return self

    async def act(self, observation: Observation) -> str:
        return next(self.actions)


async def rescore(
    episodes: Sequence[EpisodeRecord],
    *,
    options: Options,
    display: Display,
    backend: str | None = None,
    judge: str | None = None,
) -> list[Rescored]:
    """Repeat the actions of the valid `episodes` and return both versions of each, in order.

    Args:
        episodes: Recorded episodes, all of one environment.
        options: Options that override those of the recorded tasks.
        display: Shows the progress.
        backend: Kind of the sandboxes, for an environment that uses them as tools.
        judge: ``MODEL@URL`` of the judge, for an environment that needs one.

    Raises:
        UsageError: There are no valid episodes, or they are of several environments, or the environment needs more.
        UnknownEnvError: The environment is not registered.
        OptionError: The environment rejects an option.
    """
    valid = [one for one in episodes if one.valid]
    ids = sorted({one.env_id for one in valid})
    if len(ids) != 1:
        found = f"of several environments ({', '.join(ids)})" if ids else "void, so there is nothing to repeat"
        raise UsageError(f"the recorded episodes are {found}; use the file of a run with one environment")
    repeated: dict[int, Rescored] = {}
    waiting = iter(enumerate(valid))
    display.phase("rescore", len(valid))

    async def some(host: EnvHost) -> None:
        for number, before in waiting:
            task = Task(before.env_id, before.seed, {**before.options, **options})
            player = _Repeats(iter([turn.action for turn in before.turns]))
            playing = partial(play_episode, index=before.index, member=before.member, max_turns=len(before.turns))
            after = await playing(player, host, task, random.Random(0))
            repeated[number] = Rescored(before, after)
            display.advance(1)

    try:
        async with (
            open_resources(find(ids[0]).needs, backend=backend, judge=judge) as resources,
            slots(_AT_ONCE, options, resources) as host,
            anyio.create_task_group() as group,
        ):
            for _ in range(_AT_ONCE):
                group.start_soon(some, host)
    except ExceptionGroup as errors:
        raise next(leaves(errors)) from errors
    finally:
        display.close()
    return [one for _, one in sorted(repeated.items())]


def totals(found: Sequence[Rescored]) -> Mapping[str, tuple[float, float]]:
    """Return the mean reward and success, before and after, over the episodes that were repeated without a failure."""
    played = [one for one in found if one.after.valid]
    if not played:
        return {}

    def means(value: Callable[[EpisodeRecord], float]) -> tuple[float, float]:
        return fmean(value(one.before) for one in played), fmean(value(one.after) for one in played)

    return {"success": means(lambda one: one.succeeded), "reward": means(lambda one: one.reward or 0.0)}
