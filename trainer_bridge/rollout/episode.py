"""One episode: `play` leases an environment, and alternates between the actions of a player and steps.

This is the only place that steps an episode, for training, evaluation and checks. Each deadline is attributed to the
component that missed it.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import isawaitable
from typing import Literal, TypeAlias, cast

import anyio
import anyio.lowlevel

from envkit import clock
from envkit.errors import (
    CapacityError,
    DeadlineError,
    EnvError,
    EnvkitError,
    PlayerStoppedError,
    SandboxLostError,
    SandboxStartError,
    SessionBrokenError,
    SessionNotFoundError,
    UnreachableError,
)
from envkit.metrics import Fold, fold_infos
from envkit.protocols import EnvHost, Episode, EpisodePlayer, Gate, Player
from envkit.types import (
    Action,
    Cause,
    FinishReason,
    Outcome,
    Reset,
    RolloutRequest,
    Step,
    StopReason,
    Trajectory,
    Turn,
    deadline_s,
    ints,
)

from .gates import OpenGate

Phase: TypeAlias = Literal["queue", "reset", "gate", "engine", "environment", "grader"]
"""What an episode may wait for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutLimits:
    """Limits of an episode, as in the section ``rollout`` of a training file; None means no limit.

    Attributes:
        max_tokens: Maximum total length in tokens of a turn's prompt and completion. The prompt contains all earlier
            turns, unless the renderer limits the history.
        step_timeout_s: Maximum seconds that a step may take. An episode that misses one of its timeouts is void. Those
            of a step, the episode and the grader are never shorter than what the environment's own limits allow; see
            `envkit.types.deadline_s`.
        reset_timeout_s: Maximum seconds of the reset; None means `step_timeout_s`.
        player_timeout_s: Maximum seconds that the player may take for its turns together, with its waits for an engine
            but without those at the gate. Then the episode is cut off, and graded as it is.
        episode_timeout_s: Maximum seconds from the reset, with waits at the gate but without the grader.
    """

    max_turns: int
    max_tokens: int = 2048
    turn_tokens: int = 128
    step_timeout_s: float = math.inf
    retries: int = 0
    reset_timeout_s: float | None = None
    completion_timeout_s: float | None = None
    player_timeout_s: float | None = None
    episode_timeout_s: float | None = None
    grade_timeout_s: float | None = None


async def play(
    host: EnvHost,
    player: Player,
    limits: RolloutLimits,
    request: RolloutRequest,
    gate: Gate | None = None,
    *,
    on_played: Callable[[], None] | None = None,
    running: RunningEpisode | None = None,
) -> Trajectory:
    """Play one episode. An episode with a grader leaves the gate after its last turn, before it is graded.

    Without `gate`, turns are not held up. `on_played` is called once, when the episode needs its player no longer.
    `running` is the record to fill, for a caller that cancels the episode and wants what was played.

    Returns:
        The trajectory. A failure of the environment, its sandbox or server, or a missed deadline gives a void
        trajectory that names the component. Errors of the player are raised.
    """
    gate = gate or OpenGate()
    running = running or RunningEpisode(request)
    running.began_s = running.waits("queue")
    arrived = has_left = False

    def leave() -> None:
        nonlocal has_left
        if not has_left:
            has_left = True
            gate.leave(arrived=arrived)
            try:
                if running.player is not None:
                    running.player.end()
                    running.turns += _calls_of(running.player)
            finally:
                if on_played is not None:
                    on_played()

    try:
        async with host.lease(request.task) as episode:
            running.queue_s = clock.now() - running.began_s
            try:
                with _deadline(limits.episode_timeout_s, StopReason.TIMEOUT, "the episode was not over") as scope:
                    start = await _reset(running, episode, limits)
                    if limits.episode_timeout_s is not None:
                        scope.deadline += deadline_s(limits.episode_timeout_s, start.episode_limit_s)
                        scope.deadline -= limits.episode_timeout_s
                    gate.arrive()  # only now: a reset may wait for a sandbox that another episode of the wave holds
                    arrived = True
                    running.stop = await _turns(running, player, start, episode, limits, gate)
                if start.is_graded and not running.stop.is_void:
                    leave()
                    await _grade(running, episode, limits.grade_timeout_s, start.grade_limit_s)
            except (SandboxStartError, CapacityError) as error:  # a sandbox that the environment uses as a tool
                raise _VoidError(StopReason.SANDBOX_LOST, str(error)) from error
    except _VoidError as error:
        running.void(error.stop, str(error))
    except _PlayerFailedError as failed:
        raise failed.error from failed.error.__cause__
    except DeadlineError as error:
        running.void(StopReason.TIMEOUT, str(error))
    except (SandboxLostError, UnreachableError, SessionBrokenError, SessionNotFoundError) as error:
        running.void(StopReason.SANDBOX_LOST, str(error), error.cause if isinstance(error, SandboxLostError) else None)
    except EnvError as error:
        running.void(StopReason.ENV_ERROR, str(error))
    finally:
        leave()
    return running.trajectory()


async def _reset(running: RunningEpisode, episode: Episode, limits: RolloutLimits) -> Reset:
    began = running.waits("reset")
    reset_timeout_s = limits.step_timeout_s if limits.reset_timeout_s is None else limits.reset_timeout_s
    with _deadline(reset_timeout_s, StopReason.TIMEOUT, "the environment did not answer a reset"):
        start = running.start = await episode.reset()
    running.reset_s = clock.now() - began
    return start


async def _turns(
    running: RunningEpisode,
    player: Player,
    start: Reset,
    episode: Episode,
    limits: RolloutLimits,
    gate: Gate,
) -> StopReason:
    """Play the turns of an episode that was reset, and return why it ended."""
    try:
        with _errors_of_the_player():
            acting = running.player = _able_to_act(player.begin(running.request, start))
            if (enter := getattr(acting, "enter", None)) is not None:  # a player of another package may lack it
                enter(episode)
    except PlayerStoppedError as stopped:
        return _reason(stopped)
    observation, left_s = start.observation, math.inf if limits.player_timeout_s is None else limits.player_timeout_s
    step_timeout_s = deadline_s(limits.step_timeout_s, start.step_limit_s)
    while len(running.turns) < limits.max_turns:
        # Yield to the event loop so that Ctrl-C works: an environment that only computes never yields.
        await anyio.lowlevel.checkpoint()
        arrived = running.waits("gate")
        await gate.together()
        began = running.waits("engine")
        try:
            with anyio.move_on_after(left_s) as scope, _errors_of_the_player():
                action = _checked(await _coroutine(acting.act(observation)))
        except PlayerStoppedError as stopped:
            return _reason(stopped)
        finally:
            running.turns += _calls_of(acting)
        if scope.cancelled_caught:
            return StopReason.PLAYER_TIMEOUT
        acted = running.waits("environment")
        left_s -= acted - began
        step = None
        try:
            if action.completion.finish is not FinishReason.ABORTED and not running.is_aborted:
                with _deadline(step_timeout_s, StopReason.TIMEOUT, "the environment did not answer a step"):
                    step = await episode.step(action.text)
        finally:  # the record of a void episode ends with the action that was in progress
            times = {"generate_s": acted - began, "step_s": clock.now() - acted, "wait_s": began - arrived}
            running.turns.append(_turn(action, step, **times))
        if step is None:
            raise _VoidError(StopReason.ABORTED, "the engine aborted a completion")
        if step.ended:
            return StopReason.TERMINATED if step.terminated else StopReason.TRUNCATED
        observation = step.observation
    return StopReason.MAX_TURNS


def _calls_of(player: EpisodePlayer) -> list[Turn]:
    """Return the calls of a foreign agent since the last time; a player of another package may know of none."""
    return [_turn(call) for call in getattr(player, "calls", tuple)()]


def _turn(action: Action, step: Step | None = None, **times: float) -> Turn:
    return Turn(
        ints(action.new_ids),
        action.completion,
        action.text,
        step,
        starts_sample=action.starts_sample,
        generation=action.generation,
        call=action.call,
        **times,
    )


def _reason(stopped: PlayerStoppedError) -> StopReason:
    """Return why a player stopped its episode, unless that makes the episode void."""
    if stopped.stop.is_void:
        raise _VoidError(stopped.stop, str(stopped)) from stopped
    return stopped.stop


async def _grade(running: RunningEpisode, episode: Episode, timeout_s: float | None, limit_s: float | None) -> None:
    began = running.waits("grader")
    seconds = None if timeout_s is None else deadline_s(timeout_s, limit_s)
    with _deadline(seconds, StopReason.NO_GRADE, "the grader did not answer"):
        grade = await episode.grade()
    running.grade_s = clock.now() - began
    if grade is None:
        raise _VoidError(StopReason.NO_GRADE, "the grader could not run")
    running.grade, running.grader_output = grade, episode.grader_output


class _VoidError(Exception):
    """Ends a void episode from within its lease, so that its environment is not used again."""

    def __init__(self, stop: StopReason, reason: str) -> None:
        super().__init__(reason)
        self.stop = stop


class _PlayerFailedError(Exception):
    """Carries an error of the player past the handlers of the environment's errors."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


@contextmanager
def _errors_of_the_player() -> Iterator[None]:
    """Let a player stop its episode, make the episode void after a missed deadline, and pass on all other errors."""
    try:
        yield
    except PlayerStoppedError:
        raise
    except DeadlineError as error:
        raise PlayerStoppedError(StopReason.NO_COMPLETION, str(error)) from error
    except Exception as error:
        raise _PlayerFailedError(error) from error


def _able_to_act(player: EpisodePlayer) -> EpisodePlayer:
    act = getattr(player, "act", None)
    if not callable(act) or getattr(act, "__func__", None) is EpisodePlayer.act:
        raise EnvkitError(f"begin of the player returned {player!r} instead of an EpisodePlayer: it has no method act")
    return player


def _coroutine(answer: Awaitable[Action | str]) -> Awaitable[Action | str]:
    if not isawaitable(answer):
        raise EnvkitError(f"act of the player returned {answer!r} at once; write it as `async def act`")
    return answer


def _checked(action: Action | str) -> Action:
    if isinstance(action, str):
        return Action(action)
    if not isinstance(action, Action):
        raise EnvkitError(f"the player returned {action!r} instead of an action, which must be a text or an Action")
    return action


@contextmanager
def _deadline(seconds: float | None, stop: StopReason, what: str) -> Iterator[anyio.CancelScope]:
    """Cancel the block after `seconds` and end the episode. A `TimeoutError` raised inside the block passes through."""
    began = clock.now()
    with anyio.move_on_after(seconds) as scope:
        yield scope
    if scope.cancelled_caught:
        raise _VoidError(stop, f"{what} within {scope.deadline - began:g} s")


@dataclass(slots=True, eq=False)
class RunningEpisode:
    """The record of an episode in progress.

    Attributes:
        doing: What it waits for, since `since_s`.
        is_aborted: Whether it must take no other step: it ends after the completion in progress.
    """

    request: RolloutRequest
    began_s: float = 0.0
    doing: Phase = "queue"
    since_s: float = 0.0
    is_aborted: bool = False
    queue_s: float = 0.0
    reset_s: float = 0.0
    start: Reset | None = None
    player: EpisodePlayer | None = None
    turns: list[Turn] = field(default_factory=list)
    stop: StopReason | None = None
    grade: float | None = None
    grader_output: str = ""
    grade_s: float = 0.0
    failure: Outcome | None = None

    @property
    def steps(self) -> int:
        """Number of steps that the environment has answered."""
        return sum(turn.step is not None for turn in self.turns)

    def waits(self, doing: Phase) -> float:
        """Enter what the episode waits for from now on, and return the time."""
        self.doing, self.since_s = doing, clock.now()
        return self.since_s

    def void(self, stop: StopReason, error: str, cause: Cause | None = None) -> None:
        """Make the episode void."""
        self.failure = Outcome.void(stop, error, cause)

    def trajectory(self) -> Trajectory:
        """Return the record of an episode that has ended."""
        request = self.request
        return Trajectory(
            request.task,
            request.member,
            tuple(self.turns),
            self.failure or self._score(),
            start=self.start,
            key=request.key,
            attempt=request.attempt,
            group=request.group,
            index=request.index,
            began_s=self.began_s,
            queue_s=self.queue_s,
            reset_s=self.reset_s,
            grade_s=self.grade_s,
        )

    def _score(self) -> Outcome:
        assert self.stop is not None, "the episode has ended"
        assert self.start is not None, "the episode was reset"
        steps, info = [turn.step for turn in self.turns if turn.step is not None], self.start.info
        declared = info.get("metrics")
        folds = cast("dict[str, Fold]", declared if isinstance(declared, dict) else {})
        metrics = fold_infos([one.info for one in steps] or [info], folds)
        if "success" in folds and (self.stop is StopReason.HUNG or "success" not in metrics):
            metrics["success"] = 0.0  # an environment may report it only in the last step
        success_return = None if self.stop is StopReason.HUNG else info.get("success_return")
        return Outcome.score(
            self.stop,
            sum(one.reward for one in steps) + (self.grade or 0.0),
            metrics,
            grade=self.grade,
            success_return=success_return if isinstance(success_return, (int, float)) else None,
            grader_output=self.grader_output,
        )
