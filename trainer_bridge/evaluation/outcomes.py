"""Evaluated episodes, how they ended, and the tally of an evaluation by task and attempt."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from envkit.errors import UsageError
from envkit.metrics import pass_all, pass_at
from envkit.runs.display import Display
from envkit.types import JSON, EpisodeRecord, GenerationRecord, Info, Outcome, StopReason

from .statistics import CUT, Estimate, estimate, summarise

CUT_BY = {
    StopReason.MAX_TURNS: "cut_by_turns",
    StopReason.CONTEXT_OVERFLOW: "cut_by_context",
    StopReason.REFUSED: "refused",
    StopReason.PLAYER_TIMEOUT: "cut_by_time",
}
BY_LENGTH = "cut_by_length"
ENDINGS = ("solved", "wrong", "ended", *CUT_BY.values(), BY_LENGTH, "void")
"""How an episode ended. ``ended``: by itself, but its success is unknown. ``cut_by_length``: it is wrong, and some of
its answers reached their token limit."""


class TokenUsage(NamedTuple):
    """Numbers of tokens that a language model read and wrote.

    Attributes:
        completions: Number of completions.
        cut: Number of completions that were cut off; see `envkit.types.Completion.is_cut`.
        prompt_tokens: Tokens of the prompts. For a model in this process, only those added since the last completion.
        completion_tokens: Tokens of the completions.
        seconds: Sum of the durations of the completions, with waits for the engine, even if they overlapped.
    """

    completions: int = 0
    cut: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0

    @classmethod
    def total(cls, usages: Iterable[TokenUsage]) -> TokenUsage:
        return cls(*map(sum, zip(*usages, strict=True)))


@dataclass(frozen=True, slots=True)
class EvaluatedEpisode:
    """An episode of an evaluation.

    Attributes:
        shortest: Number of moves of the level's shortest solution; None if the environment does not report it.
        usage: Numbers of tokens of a language model; zeros for other players.
        env_s: Seconds of the environment and its tools in the steps.
    """

    outcome: Outcome
    turns: int = 0
    shortest: int | None = None
    usage: TokenUsage = field(default_factory=TokenUsage)
    env_s: float = 0.0

    @classmethod
    def of(cls, episode: EpisodeRecord) -> EvaluatedEpisode:
        """Return a recorded episode."""
        usage = TokenUsage.total(_usage_of(turn.generation) for turn in episode.turns if turn.generation is not None)
        env_s = math.fsum(turn.seconds or 0.0 for turn in episode.turns)
        return cls(episode.outcome, len(episode.turns), shortest_of(episode.start_info), usage, env_s)

    @property
    def ending(self) -> str:
        """One of `ENDINGS`."""
        outcome = self.outcome
        if outcome.is_void:
            return "void"
        if outcome.success:
            return "solved"
        if outcome.stop in CUT_BY:
            return CUT_BY[outcome.stop]
        if self.usage.cut:
            return BY_LENGTH
        return "ended" if outcome.success is None else "wrong"

    @property
    def is_cut(self) -> bool:
        """Whether a limit cut off the episode or one of its answers, even if it succeeded."""
        return self.outcome.stop in CUT_BY or self.usage.cut > 0

    @property
    def values(self) -> dict[str, float]:
        """The metrics of an episode that is not void, with its return and number of turns."""
        assert self.outcome.reward is not None, "the episode is not void"
        cut = {CUT: self.usage.cut / self.usage.completions} if self.usage.completions else {}
        return {**self.outcome.values, **cut, "return": self.outcome.reward, "turns": float(self.turns)}


def shortest_of(info: Info) -> int | None:
    """Return ``info["level"]["shortest"]``, the number of moves of a level's shortest solution, or None if missing."""
    level = info.get("level")
    shortest = level.get("shortest") if isinstance(level, dict) else None
    return shortest if isinstance(shortest, int) and not isinstance(shortest, bool) else None


class Tally:
    """Collects the episodes of an evaluation, and displays how many there are and their success rate.

    Attributes:
        versions: The environment's ``info["versions"]``, from its resets; empty if it reports none.
        success_rule: How success is defined, in words.
    """

    def __init__(
        self, tasks: int, attempts: int, display: Display, on_episode: Callable[[EpisodeRecord], None] | None
    ) -> None:
        self.total = tasks * attempts
        self.versions: Mapping[str, JSON] = {}
        self.success_rule = (
            "unknown: the environment reports no metric success, has no grader, and declares no success_return"
        )
        self._episodes: list[dict[int, EvaluatedEpisode]] = [{} for _ in range(tasks)]
        self._display = display
        self._on_episode = on_episode
        self._known: list[bool] = []
        self._returns: list[float] = []
        self._count = 0

    @property
    def finished(self) -> set[tuple[int, int]]:
        """Task and attempt numbers of the episodes that are not void."""
        return {
            (task, attempt)
            for task, attempts in enumerate(self._episodes)
            for attempt, episode in attempts.items()
            if not episode.outcome.is_void
        }

    @property
    def by_task(self) -> list[list[EvaluatedEpisode]]:
        """The episodes so far: for each task, in order, a list with its attempts."""
        return [[episode for _, episode in sorted(attempts.items())] for attempts in self._episodes]

    def restore(self, episodes: Iterable[EpisodeRecord]) -> int:
        """Add those of the `episodes` of an interrupted evaluation that are not void, and return their number."""
        for episode in episodes:
            if not episode.outcome.is_void:
                self._put(episode)
        if self._count:
            self._show(self._count)
        return self._count

    def add(self, episode: EpisodeRecord) -> None:
        """Add an episode. It replaces an earlier void episode of the same task and attempt."""
        before = self._count
        self._put(episode)
        if self._on_episode is not None:
            self._on_episode(episode)
        self._show(self._count - before)

    def so_far(self) -> str:
        """Return a summary of an interrupted evaluation in one line; empty if no episode has ended."""
        if self._count == 0:
            return ""
        known = [some for task in self.by_task if (some := _successes(task))]
        success = ""
        if known:
            found = estimate(known, is_share=True)
            success = f", success {found.mean:.1%} ({found.low:.1%} – {found.high:.1%}; short episodes count too often)"
        return f"stopped after {self._count} of {self.total} episodes{success}"

    def _put(self, episode: EpisodeRecord) -> None:
        found = EvaluatedEpisode.of(episode)
        versions = episode.start_info.get("versions")
        if isinstance(versions, dict):
            if self.versions and versions != self.versions:
                problem = f"episodes of different versions, {dict(self.versions)} and {versions}"
                raise UsageError(f"the evaluation has {problem}; replace it with --force, or choose another folder")
            self.versions = versions
        attempts = self._episodes[episode.index]
        self._count += episode.member not in attempts
        attempts[episode.member] = found
        if found.outcome.success is not None:
            self._known.append(found.outcome.success)
            self.success_rule = _success_rule(episode)
        if found.outcome.reward is not None:
            self._returns.append(found.outcome.reward)

    def _show(self, count: int) -> None:
        name, values = ("success", self._known) if self._known else ("return", self._returns)
        self._display.advance(count, **{name: sum(values) / len(values) if values else math.nan})


def _success_rule(episode: EpisodeRecord) -> str:
    """Return the rule of `envkit.types.outcomes.is_success` that decided, in words."""
    if "success" in episode.start_info.get("metrics", {}):
        return "metric success >= 1"
    if episode.outcome.grade is not None:
        return "grade >= 1"
    return f"return >= {episode.start_info.get('success_return')}"


def measure(tasks: Sequence[Sequence[EvaluatedEpisode]], attempts: int) -> dict[str, Estimate]:
    """Return the estimates of an evaluation with this number of attempts per task: success, then all other metrics.

    With several attempts, success is followed by pass@k, pass^k (all of k attempts succeed) and ``flips``, the share of
    tasks with successful and other attempts. If a limit cut episodes off, ``success_uncut`` and ``return_uncut`` are
    the means over the others. Void episodes are ignored.
    """
    valid = [[one for one in task if not one.outcome.is_void] for task in tasks]
    found = summarise([[one.values for one in task] for task in valid])
    first = {name: found.pop(name) for name in ("success",) if name in found}
    uncut = [[one for one in task if not one.is_cut] for task in valid]
    if sum(map(len, uncut)) not in (0, sum(map(len, valid))):
        rest = summarise([[one.values for one in task] for task in uncut])
        first |= {f"{name}_uncut": rest[name] for name in ("success", "return") if name in rest}
    if attempts > 1 and "success" in first:
        solved = [_successes(task) for task in valid]
        shares: dict[str, list[list[float]]] = {}
        powers = [1 << exponent for exponent in range((attempts - 1).bit_length())]
        for k in [*powers, attempts]:
            some = [one for one in solved if len(one) >= k]
            shares[f"pass@{k}"] = [[pass_at(k, one)] for one in some]
            shares[f"pass^{k}"] = [[pass_all(k, one)] for one in some if k > 1]  # pass^1 is pass@1
        shares["flips"] = [[float(len({*one}) == 2)] for one in solved if len(one) > 1]
        first |= {name: estimate(values, is_share=True) for name, values in shares.items() if values}
    return first | found


def total_usage(tasks: Sequence[Sequence[EvaluatedEpisode]]) -> TokenUsage:
    """Return the token usage of all episodes that are not void."""
    return TokenUsage.total(one.usage for task in tasks for one in task if not one.outcome.is_void)


def _successes(task: Sequence[EvaluatedEpisode]) -> list[bool]:
    """Return the successes of the attempts at a task where they are known."""
    return [one.outcome.success for one in task if one.outcome.success is not None]


def _usage_of(generation: GenerationRecord) -> TokenUsage:
    return TokenUsage(1, int(generation.is_cut), *generation.num_tokens, generation.seconds)
