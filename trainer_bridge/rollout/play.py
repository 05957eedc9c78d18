"""One episode, played by the policy: `play` leases an environment, and alternates between completions and steps.

Each deadline is attributed to the component that missed it. Sampling seeds depend only on the request and the turn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import cast

import anyio

from envkit import clock
from envkit.errors import (
    CapacityError,
    DeadlineError,
    EnvError,
    EnvkitError,
    SandboxLostError,
    SandboxStartError,
    SessionBrokenError,
    SessionNotFoundError,
    UnreachableError,
)
from envkit.metrics import Fold, fold_infos, with_grade
from envkit.protocols import Engine, EnvHost, Episode, Gate, GradedEpisode, Renderer
from envkit.types import (
    Cause,
    Completion,
    Exchange,
    FinishReason,
    Prompt,
    Reset,
    RolloutRequest,
    StopReason,
    Trajectory,
    Turn,
    ints,
    stable_hash,
)

from .gates import OpenGate


@dataclass(frozen=True, slots=True)
class RolloutLimits:
    """Limits of an episode.

    Attributes:
        max_turns: Maximum number of turns.
        max_tokens: Maximum total length in tokens of a turn's prompt and completion. The prompt contains all earlier
            turns, unless the renderer limits the history.
        turn_tokens: Maximum number of tokens of a completion.
        timeout_s: Maximum seconds that a step may take. An episode that misses one of its timeouts is void.
        retries: Maximum number of times that a void episode is played again.
        reset_timeout_s: Maximum seconds of the reset; None means `timeout_s`.
        completion_timeout_s: Maximum seconds of a completion from its first token; see `SamplingParams.timeout_s`. None
            means no limit.
        episode_timeout_s: Maximum seconds of the episode from its reset, including its waits at the gate but without
            its grader; None means no limit.
        grade_timeout_s: Maximum seconds of the grader; None means no limit.
    """

    max_turns: int
    max_tokens: int
    turn_tokens: int
    timeout_s: float
    retries: int
    reset_timeout_s: float | None = None
    completion_timeout_s: float | None = None
    episode_timeout_s: float | None = None
    grade_timeout_s: float | None = None


async def play(
    host: EnvHost,
    engine: Engine,
    renderer: Renderer,
    limits: RolloutLimits,
    request: RolloutRequest,
    gate: Gate | None = None,
    *,
    on_played: Callable[[], None] | None = None,
) -> Trajectory:
    """Play one episode. An episode with a grader leaves the gate after its last turn, before it is graded.

    Args:
        host: Leases the environment.
        engine: Samples the completions.
        renderer: Builds prompts and reads actions.
        limits: Limits of the episode.
        request: The episode to play.
        gate: Decides when each turn may reach the engine; None lets every turn through.
        on_played: Called once, when the episode needs the engine no longer.

    Returns:
        The trajectory. A failure of the environment, its sandbox or server, or a missed deadline gives a void
        trajectory that names the component. Failures of the engine are raised.
    """
    gate = gate or OpenGate()
    playing = _Playing(request, began_s=clock.now())
    arrived = has_left = False

    def leave() -> None:
        nonlocal has_left
        if not has_left:
            has_left = True
            gate.leave(arrived=arrived)
            engine.forget(request.session)
            if on_played is not None:
                on_played()

    try:
        async with host.lease(request.task) as episode:
            playing.queue_s = clock.now() - playing.began_s
            try:
                with _deadline(limits.episode_timeout_s, StopReason.TIMEOUT, "the episode was not over"):
                    start = await _reset(playing, episode, limits)
                    gate.arrive()  # only now: a reset may wait for a sandbox that another episode of the wave holds
                    arrived = True
                    playing.stop = await _turns(playing, start, episode, engine, renderer, limits, gate)
                if start.is_graded and not playing.stop.is_void:
                    leave()
                    await _grade(playing, episode, limits)
            except (SandboxStartError, CapacityError) as error:  # a sandbox that the environment uses as a tool
                raise _EpisodeEndedError(StopReason.SANDBOX_LOST, str(error)) from error
    except _EpisodeEndedError as ended:
        playing.end(ended.stop, str(ended))
    except _EngineFailedError as failed:
        raise failed.error from None
    except DeadlineError as error:
        playing.end(StopReason.TIMEOUT, str(error))
    except (SandboxLostError, UnreachableError, SessionBrokenError, SessionNotFoundError) as error:
        playing.end(StopReason.SANDBOX_LOST, str(error), error.cause if isinstance(error, SandboxLostError) else None)
    except EnvError as error:
        playing.end(StopReason.ENV_ERROR, str(error))
    finally:
        leave()
    return playing.trajectory()


async def _reset(playing: _Playing, episode: Episode, limits: RolloutLimits) -> Reset:
    """Start a leased episode."""
    began = clock.now()
    reset_timeout_s = limits.timeout_s if limits.reset_timeout_s is None else limits.reset_timeout_s
    with _deadline(reset_timeout_s, StopReason.TIMEOUT, "the environment did not answer a reset"):
        start = playing.start = await episode.reset()
    playing.reset_s = clock.now() - began
    folds = start.info.get("metrics")
    playing.folds = cast("dict[str, Fold]", folds) if isinstance(folds, dict) else {}
    return start


async def _turns(
    playing: _Playing,
    start: Reset,
    episode: Episode,
    engine: Engine,
    renderer: Renderer,
    limits: RolloutLimits,
    gate: Gate,
) -> StopReason:
    """Play the turns of an episode that was reset, and return why it ended."""
    request, session = playing.request, playing.request.session
    if start.system is not None or start.tools:
        renderer = renderer.for_episode(start)
    history: list[Exchange] = []
    ids: list[int] = []
    observation = start.observation
    prompt = Prompt(renderer.open(observation), starts_sample=True)
    while True:
        if prompt.starts_sample:
            ids = []
        if len(ids) + len(prompt.ids) + limits.turn_tokens > limits.max_tokens:
            return StopReason.CONTEXT_OVERFLOW
        ids += prompt.ids
        arrived = clock.now()
        await gate.together()
        began = clock.now()
        params = replace(request.params, seed=stable_hash(request.params.seed, len(playing.turns)))
        try:
            timed = replace(params, timeout_s=limits.completion_timeout_s or math.inf)
            completion: Completion = await engine.generate(ids, timed, session=session)
        except DeadlineError as error:
            raise _EpisodeEndedError(StopReason.NO_COMPLETION, str(error)) from error
        except EnvkitError as error:
            raise _EngineFailedError(error) from error
        token_ids = completion.token_ids.tolist()
        ids += token_ids
        generated = clock.now()
        action, step = "", None
        if completion.finish is not FinishReason.ABORTED:
            action = renderer.action(token_ids)
            with _deadline(limits.timeout_s, StopReason.TIMEOUT, "the environment did not answer a step"):
                step = await episode.step(action)
            if not math.isfinite(step.reward):
                reason = f"the environment returned the reward {step.reward} in turn {len(playing.turns)}"
                raise _EpisodeEndedError(StopReason.ENV_ERROR, reason)
        seconds = (generated - began, clock.now() - generated, began - arrived)
        playing.turns.append(
            Turn(ints(prompt.ids), completion, action, step, *seconds, starts_sample=prompt.starts_sample)
        )
        if step is None:
            return StopReason.ABORTED
        if step.terminated or step.truncated:
            return StopReason.TERMINATED if step.terminated else StopReason.TRUNCATED
        if len(playing.turns) == limits.max_turns:
            return StopReason.MAX_TURNS
        history.append(Exchange(observation, tuple(token_ids)))
        observation = step.observation
        prompt = renderer.extend(history, observation)


async def _grade(playing: _Playing, episode: Episode, limits: RolloutLimits) -> None:
    """Grade an episode whose last turn was played."""
    if not isinstance(episode, GradedEpisode):
        raise _EpisodeEndedError(StopReason.NO_GRADE, "the reset announced a grader, but the host passes none on")
    began = clock.now()
    with _deadline(limits.grade_timeout_s, StopReason.NO_GRADE, "the grader did not answer"):
        grade = await episode.grade()
    playing.grade_s = clock.now() - began
    if grade is None:
        raise _EpisodeEndedError(StopReason.NO_GRADE, "the grader could not run")
    if not math.isfinite(grade):
        raise _EpisodeEndedError(StopReason.NO_GRADE, f"the grader returned the reward {grade}")
    playing.grade = grade


class _EpisodeEndedError(Exception):
    """Ends a void episode from within its lease, so that its environment is not used again."""

    def __init__(self, stop: StopReason, reason: str) -> None:
        super().__init__(reason)
        self.stop = stop


class _EngineFailedError(Exception):
    """Carries an error of the engine past the handlers of the environment's errors."""

    def __init__(self, error: EnvkitError) -> None:
        super().__init__(str(error))
        self.error = error


@contextmanager
def _deadline(seconds: float | None, stop: StopReason, what: str) -> Iterator[None]:
    """Cancel the block after `seconds` and end the episode. A `TimeoutError` raised inside the block passes through."""
    with anyio.move_on_after(seconds) as scope:
        yield
    if scope.cancelled_caught:
        raise _EpisodeEndedError(stop, f"{what} within {seconds:g} s")


@dataclass(slots=True)
class _Playing:
    """An episode in progress."""

    request: RolloutRequest
    began_s: float
    queue_s: float = 0.0
    reset_s: float = 0.0
    turns: list[Turn] = field(default_factory=list)
    folds: dict[str, Fold] = field(default_factory=dict)
    stop: StopReason | None = None
    error: str | None = None
    cause: Cause | None = None
    start: Reset | None = None
    grade: float | None = None
    grade_s: float = 0.0

    def end(self, stop: StopReason, error: str, cause: Cause | None = None) -> None:
        self.stop, self.error, self.cause = stop, error, cause

    def trajectory(self) -> Trajectory:
        assert self.stop is not None, "the episode has ended"
        steps = [turn.step for turn in self.turns if turn.step is not None]
        reward, metrics = sum(step.reward for step in steps), fold_infos([step.info for step in steps], self.folds)
        if self.grade is not None:
            reward, metrics = reward + self.grade, with_grade(metrics, self.grade)
        return Trajectory(
            task=self.request.task,
            member=self.request.member,
            turns=tuple(self.turns),
            stop=self.stop,
            reward=reward,
            metrics=metrics,
            error=self.error,
            start=self.start,
            cause=self.cause,
            key=self.request.key,
            attempt=self.request.attempt,
            group=self.request.group,
            began_s=self.began_s,
            queue_s=self.queue_s,
            reset_s=self.reset_s,
            grade=self.grade,
            grade_s=self.grade_s,
        )
