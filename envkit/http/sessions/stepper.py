"""`Stepper`, which plays the steps of sessions: synchronously, through a future, or in a task of the event loop."""

from __future__ import annotations

import logging
from asyncio import Future
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import anyio
from anyio.abc import TaskGroup
from msgspec import Raw

from envkit.env import env_error
from envkit.errors import (
    CapacityError,
    EnvError,
    EnvkitError,
    SandboxLostError,
    SandboxStartError,
    SessionBrokenError,
    UnreachableError,
)
from envkit.http.sessions.session import Move, Session
from envkit.types import Step, Task

_log = logging.getLogger(__name__)

BOUNDS_S = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
"""Upper bounds of the buckets in which `SessionCounters` counts steps by duration, in seconds."""
_SHORTEST_S = BOUNDS_S[0]


class SessionCounters:
    """Counters for all sessions of a server.

    The counters are plain numbers, because counting with a metrics library may take more time than a step.

    Attributes:
        sessions: Number of created sessions.
        step_seconds: Total duration of all steps in seconds, including failed steps.
        buckets: Number of steps by duration: one bucket for each upper bound in `BOUNDS_S`, and one for longer steps.
        errors: Number of error answers for each error code.
    """

    def __init__(self) -> None:
        self.sessions = 0
        self.step_seconds = 0.0
        self.buckets = [0] * (len(BOUNDS_S) + 1)
        self.errors: Counter[str] = Counter()

    def step(self, seconds: float) -> None:
        self.step_seconds += seconds
        self.buckets[0 if seconds <= _SHORTEST_S else bisect_left(BOUNDS_S, seconds)] += 1


@dataclass(slots=True, eq=False)
class Stepper:
    """Plays the steps of all sessions of a server.

    `tasks` repeats a step if its sandbox or connection was lost before the future of the step had a result.
    """

    counters: SessionCounters
    now: Callable[[], float]
    precise: Callable[[], float]
    tasks: TaskGroup

    def compute(self, session: Session, turn: int, action: str) -> Step | None:
        """Play a step without waiting and return its result; None if the environment does not compute synchronously.

        Raises:
            EnvkitError: The step failed; the session is broken.
        """
        if session.episode is None or not session.episode.computes:
            return None
        answer: Step | EnvkitError
        began = self.precise()
        try:
            answer = session.episode.step_now(action)
        except Exception as error:
            answer = attributed(error, session.task)
        self.counters.step(self.precise() - began)
        return session.play(turn, action, answer)

    def start_step(self, session: Session, turn: int, action: str, settled: Callable[[Move], None]) -> bool:
        """Start the next step, and call `settled` when the step has ended.

        Returns:
            False if no step was started, because the episode cannot play this step through a future.
        """
        began = self.precise()
        try:
            answer = None if session.episode is None else session.episode.start_step(action)
        except EnvkitError:
            return False
        if answer is None:
            return False
        session.stepping = answer
        move = session.begin(turn, action)
        session.step_began = began
        answer.add_done_callback(partial(self._finish_step, session, move, settled))
        return True

    async def play(self, session: Session, move: Move) -> None:
        """Play the step `move`, which has begun. It gets a result or error even if the calling task is cancelled."""
        session.stepping = anyio.CancelScope()
        session.step_began = self.precise()
        await self._play(session, move, session.stepping)

    def _finish_step(self, session: Session, move: Move, settled: Callable[[Move], None], answer: Future[Raw]) -> None:
        assert session.episode is not None
        step: Step | EnvkitError = session.interrupt_error
        try:
            if not (session.is_interrupted or answer.cancelled()):
                step = session.episode.finish_step(answer)
        except (SandboxLostError, UnreachableError):  # `Episode.step` can still recover the episode
            session.stepping = anyio.CancelScope()
            self.tasks.start_soon(self._play_again, session, move, settled, session.stepping)
            return
        except Exception as error:
            step = attributed(error, session.task)
        self._settle(session, move, step)
        settled(move)

    async def _play_again(
        self, session: Session, move: Move, settled: Callable[[Move], None], scope: anyio.CancelScope
    ) -> None:
        try:
            await self._play(session, move, scope)
        finally:
            settled(move)

    async def _play(self, session: Session, move: Move, scope: anyio.CancelScope) -> None:
        assert session.episode is not None
        answer: Step | EnvkitError | None = None
        try:
            with scope:
                answer = await session.episode.step(move.action)
        except Exception as error:
            answer = attributed(error, session.task)
        finally:
            if session.is_interrupted:
                answer = session.interrupt_error
            elif answer is None:
                answer = SessionBrokenError(f"session {session.id}: cancelled in turn {move.turn}")
            self._settle(session, move, answer)

    def _settle(self, session: Session, move: Move, answer: Step | EnvkitError) -> None:
        session.used_at = self.now()
        # Drop the future: it would keep the whole response in memory until the next step.
        session.stepping = None
        self.counters.step(self.precise() - session.step_began)
        session.settle(move, answer)


def attributed(error: Exception, task: Task) -> EnvkitError:
    """Return the error to report for a session whose environment, sandbox or host raised `error`.

    If the environment raised the error, its traceback is logged here.
    """
    # A host whose lease uses a task group raises the error inside an exception group.
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    found = error if isinstance(error, EnvkitError) else env_error(error, task.env_id, "its host")
    if isinstance(found, CapacityError):  # no room for a sandbox of the environment; a caller must not wait for a slot
        return SandboxStartError(f"of {task.env_id}", found.detail)
    if isinstance(found, EnvError):
        _log.error("%s\nseed %d, options %s\n%s", found, task.seed, dict(task.options), found.trace)
    return found
