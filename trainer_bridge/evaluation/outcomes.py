"""Outcomes of evaluated episodes, by task and attempt."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce

from envkit.errors import UsageError
from envkit.metrics import pass_at
from envkit.runs.display import Display
from envkit.trainer_bridge.evaluation.statistics import Estimate, clipped, estimate, share, summarise
from envkit.types import JSON, Cause, EpisodeRecord, FinishReason, GenerationRecord, Info, StopReason

CUT = "answers_cut_off"
"""Metric: share of an episode's answers that reached their token limit."""
VALID = "action_is_valid"
"""Metric of most environments: share of an episode's actions in a valid format."""


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Numbers of tokens that a language model read and wrote.

    Attributes:
        completions: Number of completions.
        cut: Number of completions that reached their token limit. A completion of one token never counts as cut.
        prompt_tokens: Tokens of the prompts. For a model in this process, only those added since the last completion.
        completion_tokens: Tokens of the completions.
        seconds: Sum of the durations of the completions, even if they overlapped.
    """

    completions: int = 0
    cut: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0

    def plus(self, other: TokenUsage) -> TokenUsage:
        return TokenUsage(
            self.completions + other.completions,
            self.cut + other.cut,
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.seconds + other.seconds,
        )


@dataclass(frozen=True, slots=True)
class EpisodeOutcome:
    """Outcome of one episode.

    Attributes:
        stop: Why the episode ended.
        metrics: The metrics; empty for a void episode.
        error: Why the episode is void, in one line; None for a finished episode.
        cause: Why the episode's sandbox was lost; None if no sandbox was lost.
        shortest: Number of moves of the level's shortest solution; None if the environment does not report it.
        usage: Numbers of tokens of a language model; zeros for other players.
    """

    stop: StopReason
    metrics: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None
    cause: Cause | None = None
    shortest: int | None = None
    usage: TokenUsage = TokenUsage()

    @property
    def is_solved(self) -> bool:
        return self.metrics.get("success") == 1


def outcome_of(episode: EpisodeRecord) -> EpisodeOutcome:
    """Return the outcome of a recorded episode."""
    shortest = shortest_of(episode.start_info)
    if not episode.valid:
        return EpisodeOutcome(
            episode.stop, error=episode.error or episode.stop.value, cause=episode.cause, shortest=shortest
        )
    usage = TokenUsage()
    for turn in episode.turns:
        if turn.generation is not None:
            usage = usage.plus(_usage_of(turn.generation))
    metrics = {name: _number(value) for name, value in episode.metrics.items()}
    if not episode.turns and "success" in episode.start_info:
        # The first prompt exceeded the token limit, so no step was played that could report success.
        metrics["success"] = 0.0
    if usage.completions:
        metrics[CUT] = usage.cut / usage.completions
    metrics |= {"return": _number(episode.reward), "turns": float(len(episode.turns))}
    return EpisodeOutcome(episode.stop, metrics, shortest=shortest, usage=usage)


def shortest_of(info: Info) -> int | None:
    """Return ``info["level"]["shortest"]``, the number of moves of a level's shortest solution, or None if missing."""
    level = info.get("level")
    shortest = level.get("shortest") if isinstance(level, dict) else None
    return shortest if isinstance(shortest, int) and not isinstance(shortest, bool) else None


class OutcomeTally:
    """Collects the outcomes of an evaluation, and displays how many there are and their success rate.

    Args:
        tasks: Number of tasks.
        attempts: Number of episodes per task.
        display: Shows the progress.
        on_episode: Called with every added episode.
    """

    def __init__(
        self, tasks: int, attempts: int, display: Display, on_episode: Callable[[EpisodeRecord], None] | None
    ) -> None:
        self.total = tasks * attempts
        self._outcomes: list[dict[int, EpisodeOutcome]] = [{} for _ in range(tasks)]
        self._display = display
        self._on_episode = on_episode
        self.versions: Mapping[str, JSON] = {}
        """The environment's ``info["versions"]``, from its resets; empty if it reports none."""
        self._success = 0.0
        self._successes_known = 0
        self._count = 0

    @property
    def finished(self) -> set[tuple[int, int]]:
        """Task and attempt numbers of the episodes that are not void."""
        return {
            (task, attempt)
            for task, attempts in enumerate(self._outcomes)
            for attempt, outcome in attempts.items()
            if outcome.error is None
        }

    @property
    def by_task(self) -> list[list[EpisodeOutcome]]:
        """The outcomes so far: for each task, in order, a list with the outcomes of its attempts."""
        return [[outcome for _, outcome in sorted(attempts.items())] for attempts in self._outcomes]

    def restore(self, episodes: Iterable[EpisodeRecord]) -> int:
        """Add those of the `episodes` of an interrupted evaluation that are not void, and return their number."""
        before = self._count
        for episode in episodes:
            if episode.valid:
                self._put(episode)
        if self._count > before:
            self._show(self._count - before)
        return self._count - before

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
        found = _share([task for task in self.by_task if task])
        success = "" if found is None else f", success {found.mean:.1%} ({found.low:.1%} – {found.high:.1%})"
        return f"stopped after {self._count} of {self.total} episodes{success}"

    def _put(self, episode: EpisodeRecord) -> None:
        outcome = outcome_of(episode)
        versions = episode.start_info.get("versions")
        if isinstance(versions, dict):
            if self.versions and versions != self.versions:
                problem = f"episodes of different versions, {dict(self.versions)} and {versions}"
                raise UsageError(f"the evaluation has {problem}; replace it with --force, or choose another folder")
            self.versions = versions
        attempts = self._outcomes[episode.index]
        self._count += episode.member not in attempts
        attempts[episode.member] = outcome
        if "success" in outcome.metrics:
            self._success += outcome.metrics["success"]
            self._successes_known += 1

    def _show(self, count: int) -> None:
        known = self._successes_known
        self._display.advance(count, success=self._success / known if known else math.nan)


def measure(tasks: Sequence[Sequence[EpisodeOutcome]], attempts: int) -> dict[str, Estimate]:
    """Return the estimates of an evaluation: success, pass@k if there are several attempts, then all other metrics.

    Args:
        tasks: For each task, the outcomes of its attempts; void episodes are ignored.
        attempts: Requested number of episodes per task.
    """
    valid = [[one for one in task if one.error is None] for task in tasks]
    found = summarise([[one.metrics for one in task] for task in valid])
    found |= {name: clipped(found[name]) for name in (CUT, VALID) if name in found}
    if attempts == 1 or "success" not in found:
        return found
    first = {"success": found.pop("success")}
    for k in _powers(attempts):
        values = [pass_at(k, [one.is_solved for one in task]) for task in valid if len(task) >= k]
        if values:
            first[f"pass@{k}"] = share(values)
    return first | found


def total_usage(tasks: Sequence[Sequence[EpisodeOutcome]]) -> TokenUsage:
    """Return the token usage of all episodes that are not void."""
    return reduce(TokenUsage.plus, (one.usage for task in tasks for one in task), TokenUsage())


def _powers(attempts: int) -> list[int]:
    """Return the values of k for pass@k: the powers of two below `attempts`, then `attempts`."""
    return [*(1 << exponent for exponent in range((attempts - 1).bit_length())), attempts]


def _share(tasks: Sequence[Sequence[EpisodeOutcome]]) -> Estimate | None:
    known = [[one.metrics["success"] for one in task if "success" in one.metrics] for task in tasks]
    values = [task for task in known if task]
    return estimate(values, is_share=True) if values else None


def _usage_of(generation: GenerationRecord) -> TokenUsage:
    prompt, completion = generation.usage or (len(generation.prompt_ids), len(generation.completion_ids))
    is_cut = generation.finish is FinishReason.LENGTH and completion != 1
    return TokenUsage(1, int(is_cut), prompt, completion, generation.seconds)


def _number(value: float | None) -> float:
    return math.nan if value is None else value
