"""Outcomes of episodes: why they ended, their reward, and whether they succeeded. Success is defined here, once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import StrEnum
from typing import Self

import msgspec

from envkit.types.sandboxes import Cause


class StopReason(StrEnum):
    """Why an episode ended."""

    TERMINATED = "terminated"
    """The environment ended the episode."""
    TRUNCATED = "truncated"
    """The episode reached a limit of the environment, such as a number of moves."""
    MAX_TURNS = "max_turns"
    """The caller's turn limit was reached, or the player stopped."""
    CONTEXT_OVERFLOW = "context_overflow"
    """The next prompt and its completion do not fit into the caller's token limit."""
    REFUSED = "refused"
    """The model's endpoint refused a request, for example because the prompt exceeds the model's context, or because of
    a content filter."""
    PLAYER_TIMEOUT = "player_timeout"
    """The player's turns together, with its waits for an engine, took longer than the caller's limit."""
    HUNG = "hung"
    """The last action made the environment hang, and did so again in two fresh environments; the episode failed."""
    TIMEOUT = "timeout"
    """A reset, a step or the whole episode exceeded the caller's timeout; the episode is void."""
    ENV_ERROR = "env_error"
    """The environment raised, or its reward was not finite; the episode is void."""
    SANDBOX_LOST = "sandbox_lost"
    """The environment's sandbox or server was lost; the episode is void."""
    NO_COMPLETION = "no_completion"
    """The engine or the model's endpoint did not complete a prompt in time; the episode is void."""
    AGENT_FAILED = "agent_failed"
    """A foreign agent ended by an error before its first call of the policy; the episode is void."""
    NO_GRADE = "no_grade"
    """The grader failed or did not answer in time; the episode is void."""
    ABORTED = "aborted"
    """The engine aborted a completion at the caller's request; the episode is void."""
    STALE = "stale"
    """The episode was dropped because its tokens come from a policy version that is too old; the episode is void."""

    @property
    def is_void(self) -> bool:
        """Whether the episode does not measure the policy, as after a lost sandbox. Training ignores such episodes."""
        return self not in _MEASURES_THE_POLICY


_MEASURES_THE_POLICY = (
    StopReason.TERMINATED,
    StopReason.TRUNCATED,
    StopReason.MAX_TURNS,
    StopReason.CONTEXT_OVERFLOW,
    StopReason.REFUSED,
    StopReason.PLAYER_TIMEOUT,
    StopReason.HUNG,
)


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of an episode: a score (`Outcome.score`), or void with its cause (`Outcome.void`).

    Attributes:
        stop: Why the episode ended.
        reward: Sum of the rewards of the steps and of the grader; None if the episode is void.
        success: Whether the episode succeeded; None if it is void, or if that is unknown. See `is_success`.
        metrics: The environment's other metrics, one value per episode; without values that are not finite.
        grade: Reward that the grader gave after the last turn, included in `reward`; None if there was no grader.
        error: Why the episode is void, in one line; None for a score.
        cause: Why the episode's sandbox was lost; None if no sandbox was lost, or if the cause is unknown.
        grader_output: The end of what the grader printed; see `envkit.protocols.Episode.grader_output`.
    """

    stop: StopReason
    reward: float | None = None
    success: bool | None = None
    metrics: dict[str, float] = {}
    grade: float | None = None
    error: str | None = None
    cause: Cause | None = None
    grader_output: str = ""

    @classmethod
    def score(
        cls,
        stop: StopReason,
        reward: float,
        metrics: Mapping[str, float | None],
        *,
        grade: float | None = None,
        success_return: float | None = None,
        grader_output: str = "",
    ) -> Self:
        """Return the outcome of an episode that measures the policy; `reward` includes `grade`.

        A reward that is not finite is an error of the environment, and makes the episode void.
        """
        if not math.isfinite(reward):
            return cls.void(StopReason.ENV_ERROR, f"the environment returned rewards whose sum is {reward}")
        known = {name: value for name, value in metrics.items() if value is not None and math.isfinite(value)}
        success = is_success(known.pop("success", None), grade, reward, success_return)
        return cls(stop=stop, reward=reward, success=success, metrics=known, grade=grade, grader_output=grader_output)

    @classmethod
    def void(cls, stop: StopReason, error: str, cause: Cause | None = None) -> Self:
        """Return the outcome of an episode that says nothing about the policy."""
        return cls(stop=stop, error=error, cause=cause)

    @property
    def is_void(self) -> bool:
        return self.stop.is_void

    @property
    def values(self) -> dict[str, float]:
        """The metrics, with ``success`` and ``grade`` where they are known."""
        known = {"success": self.success, **self.metrics, "grade": self.grade}
        return {name: float(value) for name, value in known.items() if value is not None}


def is_success(metric: float | None, grade: float | None, reward: float, success_return: float | None) -> bool | None:
    """Return whether an episode succeeded. The first rule that applies decides.

    1. the environment has the metric ``success``: whether it is at least 1 (0 if no step has reported it);
    2. the episode was graded: whether the grade is at least 1;
    3. the environment declares `success_return` (see `envkit.registry.EnvSpec`): whether the return is at least that;
    4. otherwise success is unknown: None.
    """
    if metric is not None:
        return metric >= 1
    if grade is not None:
        return grade >= 1
    return None if success_return is None else reward >= success_return
