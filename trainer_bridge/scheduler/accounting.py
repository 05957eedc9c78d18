"""Accounting of training episodes: every attempt has exactly one fate or stage, over the whole run, and so has a token.

A checkpoint has the counts of its moment. What was in progress then is played again by a resumed run, and is counted as
aborted.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum

import numpy as np

from envkit.types import Sample, StopReason, Trajectory

_NAMED = 5
"""Maximum number of episodes that an error names."""
_KIND = 40
"""Maximum characters of the kind of an action."""


class Fate(StrEnum):
    """How an attempt at a training episode ended."""

    TRAINED = "trained"
    """The trainer updated the weights with its samples."""
    DROPPED = "dropped"
    """It was in a batch, but all its tokens were masked."""
    FILTERED = "filtered"
    """A filter rejected its group, or a limit ended it before its first answer: its first prompt exceeds the context,
    or the model's time was over."""
    STALE = "stale"
    """It was dropped because its tokens would be too old."""
    ABORTED = "aborted"
    """Its group did not need it, or the run was interrupted while it was in progress."""
    VOIDED = "voided"
    """Infrastructure failed, so it does not measure the policy, or too few of its group were valid."""


class Stage(StrEnum):
    """Where an attempt is that has no fate yet."""

    QUEUED = "queued"
    """It waits for a place."""
    IN_FLIGHT = "in_flight"
    """It is being played or graded."""
    FINISHED = "finished"
    """It has ended, and its group is open, waits in the buffer, or is being trained on."""


def fate_before_training(trajectory: Trajectory) -> Fate | None:
    """Return the fate of an episode that cannot be trained on; None if it can."""
    if trajectory.is_filtered:
        return Fate.FILTERED
    if not trajectory.is_void:
        return None
    return {StopReason.STALE: Fate.STALE, StopReason.ABORTED: Fate.ABORTED}.get(trajectory.outcome.stop, Fate.VOIDED)


class Ledger:
    """All attempts of a run, and the tokens that the policy sampled for them.

    Attempts: asked = the sum over all fates and stages. Tokens: sampled = trained + the sums over the causes of masks,
    all other fates and the stages; tokens of dropped episodes are masked ones. The causes are ``masked_lag`` and those
    of `AgentCall`, such as ``masked_probe``. An entry that cannot be true, such as a second end of an attempt, does not
    end the run, but is among the `problems`.

    Args:
        counts: The counts of a checkpoint, from `counts`. Attempts without a fate are counted as aborted.
    """

    def __init__(self, counts: Mapping[str, int] | None = None) -> None:
        self._attempts: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        self._live: dict[str, Stage] = {}
        self._received: Counter[str] = Counter()
        self._wrong: list[str] = []
        for name, count in (counts or {}).items():
            kind, into = name.removeprefix("tokens_"), self._tokens if name.startswith("tokens_") else self._attempts
            into[Fate.ABORTED.value if kind in {*Stage} else kind] += count

    def ask(self, session: str) -> None:
        """Enter an attempt that waits for a place."""
        if session in self._live:
            self._wrong.append(f"episode {session} was asked for twice")
            return
        self._live[session] = Stage.QUEUED
        self._attempts["asked"] += 1

    def begin(self, session: str) -> None:
        """Enter that an attempt begins."""
        self._move(session, Stage.QUEUED, Stage.IN_FLIGHT)

    def receive(self, session: str, tokens: int) -> None:
        """Enter tokens that the engine sampled for an attempt in progress."""
        self._received[session] += tokens
        self._tokens["sampled"] += tokens

    def finish(self, session: str, tokens: int) -> None:
        """Enter that an attempt has ended, with the number of its tokens in its record."""
        self._move(session, Stage.IN_FLIGHT, Stage.FINISHED)
        if tokens != (received := self._received[session]):
            self._wrong.append(f"episode {session}: {received} tokens were sampled, and its record has {tokens}")

    def end(self, session: str, fate: Fate, *, masked: Mapping[str, int] | None = None) -> None:
        """Enter the fate of an attempt that is queued or finished, and by cause how many of its tokens were masked."""
        stage = self._live.get(session)
        if stage not in (Stage.QUEUED, Stage.FINISHED):
            where = "is not open: it has ended, or was never asked for" if stage is None else "is in progress"
            self._wrong.append(f"episode {session} ended as {fate}, but {where}")
            return
        del self._live[session]
        self._attempts[fate.value] += 1
        tokens = self._received.pop(session, 0)
        for cause, count in (masked or {}).items():
            self._tokens[f"masked_{cause}"] += count
            tokens -= count
        self._tokens["masked_lag" if fate is Fate.DROPPED else fate.value] += tokens

    def counts(self) -> dict[str, int]:
        """Return the number of attempts asked for, and of each fate and stage; the same of tokens as ``tokens_...``."""
        stages, tokens = Counter(self._live.values()), Counter[str]()
        for session, stage in self._live.items():
            tokens[stage] += self._received.get(session, 0)
        fates = [fate.value for fate in Fate]
        return {
            "asked": self._attempts["asked"],
            **{name: self._attempts[name] for name in fates},
            **{stage.value: stages[stage] for stage in Stage},
            "tokens_sampled": self._tokens["sampled"],
            **{f"tokens_{name}": self._tokens[name] for name in self._masks},
            **{f"tokens_{name}": self._tokens[name] for name in fates if name != Fate.DROPPED},
            **{f"tokens_{stage.value}": tokens[stage] for stage in (Stage.IN_FLIGHT, Stage.FINISHED)},
        }

    def problems(self, *, queued: int, in_flight: int, finished: int) -> list[str]:
        """Return why the sums do not add up, and what was wrong with the entries since the last call.

        The arguments are the numbers of attempts that the scheduler has.
        """
        counts = self.counts()
        seen = {Stage.QUEUED: queued, Stage.IN_FLIGHT: in_flight, Stage.FINISHED: finished}
        found, self._wrong = self._wrong, []
        found += [
            f"{counts[stage]} attempts are entered as {stage}, and the scheduler has {number}{self._some(stage)}"
            for stage, number in seen.items()
            if counts[stage] != number
        ]
        for total, prefix in (("asked", ""), ("tokens_sampled", "tokens_")):
            names = [*Fate, *Stage] if not prefix else [*self._masks, *Fate, *Stage]
            parts = {name: counts.get(f"{prefix}{name}", 0) for name in names}
            if sum(parts.values()) != counts[total]:
                shown = " + ".join(f"{count} {name}" for name, count in parts.items() if count)
                found.append(f"{counts[total]} {total.replace('_', ' ')}, but {shown}")
        return found

    @property
    def _masks(self) -> list[str]:
        return sorted({"masked_lag", *(name for name, count in self._tokens.items() if "masked_" in name and count)})

    def _move(self, session: str, before: Stage, after: Stage) -> None:
        if (stage := self._live.get(session)) is not before:
            state = "neither asked for nor open" if stage is None else f"{stage}"
            self._wrong.append(f"episode {session} is {state}, and cannot become {after}")
            return
        self._live[session] = after

    def _some(self, stage: Stage) -> str:
        names = [session for session, own in self._live.items() if own is stage]
        rest = len(names) - _NAMED
        more = f", and {rest} more" if rest > 0 else ""
        return f" ({', '.join(names[:_NAMED])}{more})" if names else ""


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
