"""Accounting of training episodes: every attempt that begins ends in exactly one fate.

A `Ledger` belongs to one train step. Its counts are added to the run's totals, which checkpoints contain, when the step
is finished, so a step that is interrupted and repeated counts once.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum

import numpy as np

from envkit.errors import EnvkitError
from envkit.types import Sample, StopReason, Trajectory

_NAMED = 5
"""Maximum number of episodes that an error names."""
_KIND = 40
"""Maximum characters of the kind of an action."""


class Fate(StrEnum):
    """How an attempt at a training episode ended."""

    TRAINED = "trained"
    """The trainer updated the weights with its samples."""
    FILTERED = "filtered"
    """A limit ended it before its first answer: its first prompt exceeds the context, or the model's time was over."""
    STALE = "stale"
    """It was dropped because its tokens come from a policy version that is too old."""
    ABORTED = "aborted"
    """It was aborted at the caller's request."""
    VOIDED = "voided"
    """Infrastructure failed, so it does not measure the policy."""


def fate_before_training(trajectory: Trajectory) -> Fate | None:
    """Return the fate of an episode that cannot be trained on; None if it can."""
    if trajectory.is_filtered:
        return Fate.FILTERED
    if not trajectory.is_void:
        return None
    return {StopReason.STALE: Fate.STALE, StopReason.ABORTED: Fate.ABORTED}.get(trajectory.outcome.stop, Fate.VOIDED)


class Ledger:
    """The attempts of a train step, by session, and their fates."""

    def __init__(self) -> None:
        self._fates: dict[str, Fate | None] = {}

    def begin(self, session: str) -> None:
        """Enter an attempt that begins.

        Raises:
            EnvkitError: The session has begun before.
        """
        if session in self._fates:
            raise EnvkitError(f"episode {session} began twice")
        self._fates[session] = None

    def end(self, session: str, fate: Fate) -> None:
        """Enter the fate of an attempt.

        Raises:
            EnvkitError: The session never began, or has ended before.
        """
        if session not in self._fates:
            raise EnvkitError(f"episode {session} ended as {fate}, but never began")
        if (before := self._fates[session]) is not None:
            raise EnvkitError(f"episode {session} ended twice: as {before}, and then as {fate}")
        self._fates[session] = fate

    def settle(self, trained: Iterable[str]) -> None:
        """End the sessions `trained` as trained, and check that every session has ended exactly once.

        Raises:
            EnvkitError: A session was trained twice, ended before, never began, or has no fate. The error names it. All
                other sessions are settled.
        """
        problems: list[str] = []
        for session in trained:
            try:
                self.end(session, Fate.TRAINED)
            except EnvkitError as error:
                problems.append(error.detail)
        if pending := [session for session, fate in self._fates.items() if fate is None]:
            problems.insert(0, f"{len(pending)} of {len(self._fates)} episodes have no fate: {_some(pending)}")
        if problems:
            raise EnvkitError(_some(problems, "; "))

    def counts(self) -> dict[str, int]:
        """Return the number of attempts that began (`begun`) and the number of each fate."""
        counted = Counter(fate for fate in self._fates.values() if fate is not None)
        return {"begun": len(self._fates), **{fate.value: counted[fate] for fate in Fate}}


def trained_sessions(samples: Sequence[Sample], played: Iterable[Trajectory]) -> list[str]:
    """Return the session of each episode in `samples`; if an episode is trained on repeatedly, return it repeatedly.

    Samples of the same episode have different turns, so an episode was trained on as often as any of its turns. An
    episode that is not among `played` is named by its key.
    """
    turns: dict[str, Counter[int]] = {}
    for sample in samples:
        turns.setdefault(sample.episode, Counter()).update(np.unique(sample.turn_ids[sample.mask]).tolist())
    sessions = {one.key: one.session for one in played}
    return [sessions.get(key, key) for key, counted in turns.items() for _ in range(max(counted.values(), default=1))]


def last_actions(trajectories: Iterable[Trajectory]) -> Counter[str]:
    """Return the number of episodes by the kind of their last action: of a tool call its name and first word."""
    return Counter(_kind(one.turns[-1].action) for one in trajectories if one.turns)


def _kind(action: str) -> str:
    name, text = "", action
    try:
        call = json.loads(action)
        name, text = f"{call['name']} ", str(next(iter(call["arguments"].values()), ""))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        pass  # no call of a tool
    return f"{name}{text.lstrip()[:_KIND].partition(' ')[0].partition(chr(10))[0]}"[:_KIND].strip()


def add_counts(total: Mapping[str, int], counts: Mapping[str, int]) -> dict[str, int]:
    """Return the sums by name."""
    return {name: total.get(name, 0) + count for name, count in counts.items()}


def _some(names: Sequence[str], separator: str = ", ") -> str:
    """Return a list for people, cut off after a few entries."""
    rest = len(names) - _NAMED
    return separator.join(names[:_NAMED]) + (f"{separator}and {rest} more" if rest > 0 else "")
