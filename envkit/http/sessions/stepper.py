"""How the step of a session is played: computed at once, asked for, or waited for."""

from __future__ import annotations

import logging
from asyncio import Future
from collections.abc import Callable
from functools import partial

import anyio
from anyio.abc import TaskGroup
from msgspec import Raw

from envkit.env import env_error
from envkit.errors import EnvError, EnvkitError, SandboxLostError, SessionBrokenError, UnreachableError
from envkit.http.sessions.counters import SessionCounters
from envkit.http.sessions.session import Move, Session
from envkit.types import Step, Task

_log = logging.getLogger(__name__)


class Stepper:
    """Plays the steps of all sessions of a server.

    Args:
        tally: Where they are counted.
        now: Reads the loop's clock, for deadlines.
        precise: Reads a finer one, for durations.
        tasks: Where a step is played that was asked for in vain.
    """

    def __init__(
        self, tally: SessionCounters, now: Callable[[], float], precise: Callable[[], float], tasks: TaskGroup
    ) -> None:
        self._tally = tally
        self._now = now
        self._precise = precise
        self._tasks = tasks

    def compute(self, session: Session, turn: int, action: str) -> Step | None:
        """Let a world that only computes play a step; None where there is none.

        Raises:
            EnvkitError: Whatever breaks the session.
        """
        if session.computing is None:
            return None
        answer: Step | EnvkitError
        began = self._precise()
        try:
            answer = session.computing.step_now(action)
        except Exception as error:
            answer = attributed(error, session.task)
        self._tally.step(self._precise() - began)
        return session.play(turn, action, answer)

    def start_step(self, session: Session, turn: int, action: str, settled: Callable[[Move], None]) -> bool:
        """Ask for a step that is next, and have `settled` told when it is; False where that cannot be."""
        began = self._precise()
        try:
            answer = None if session.asking is None else session.asking.start_step(action)
        except EnvkitError:
            return False
        if answer is None:
            return False
        session.stepping = answer
        move = session.begin(turn, action)
        session.step_began = began
        answer.add_done_callback(partial(self._told, session, move, settled))
        return True

    async def play(self, session: Session, move: Move) -> None:
        """Let the world play a move that was begun; whatever happens, it is settled afterwards."""
        session.stepping = anyio.CancelScope()
        session.step_began = self._precise()
        await self._play(session, move, session.stepping)

    def _told(self, session: Session, move: Move, settled: Callable[[Move], None], answer: Future[Raw]) -> None:
        assert session.asking is not None
        step: Step | EnvkitError = session.why_interrupted
        try:
            if not (session.is_interrupted or answer.cancelled()):
                step = session.asking.finish_step(answer)
        except (SandboxLostError, UnreachableError):  # `step` knows what to do about it
            session.stepping = anyio.CancelScope()
            self._tasks.start_soon(self._play_asked, session, move, settled, session.stepping)
            return
        except Exception as error:
            step = attributed(error, session.task)
        self._settle(session, move, step)
        settled(move)

    async def _play_asked(
        self, session: Session, move: Move, settled: Callable[[Move], None], scope: anyio.CancelScope
    ) -> None:
        try:
            await self._play(session, move, scope)
        finally:
            settled(move)

    async def _play(self, session: Session, move: Move, scope: anyio.CancelScope) -> None:
        assert session.episode is not None
        answer: Step | EnvkitError = SessionBrokenError(f"session {session.id}: cancelled in turn {move.turn}")
        try:
            with scope:
                answer = await session.episode.step(move.action)
        except Exception as error:
            answer = attributed(error, session.task)
        finally:
            self._settle(session, move, session.why_interrupted if session.is_interrupted else answer)

    def _settle(self, session: Session, move: Move, answer: Step | EnvkitError) -> None:
        session.used_at = self._now()
        session.stepping = None  # else its answer, and the whole message that came with it, would stay until the next
        self._tally.step(self._precise() - session.step_began)
        session.settle(move, answer)


def attributed(error: Exception, task: Task) -> EnvkitError:
    """Return what breaks a session when its environment, or the place that it is in, raised `error`.

    The traceback of an environment goes to the log, once.
    """
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:  # from a lease that runs tasks of its own
        error = error.exceptions[0]
    found = error if isinstance(error, EnvkitError) else env_error(error, task.env_id, "its host")
    if isinstance(found, EnvError):
        _log.error("%s\nseed %d, options %s\n%s", found, task.seed, dict(task.options), found.trace)
    return found
