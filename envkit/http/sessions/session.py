"""One session: its states, its turns, and the recorded answer of a repeated step. `table` owns all sessions."""

from __future__ import annotations

from asyncio import Future
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol, runtime_checkable

import anyio
import msgspec
from msgspec import Raw

from envkit import clock
from envkit.errors import EnvError, EnvkitError, SessionBrokenError, SessionConflictError, StepOrderError
from envkit.protocols import Episode, SplitStepEpisode
from envkit.types import Reset, Step, Task


class SessionState(StrEnum):
    """Where a session is in its life."""

    OPENING = "opening"
    """Its place is being leased and its world reset."""
    READY = "ready"
    """It waits for the next action."""
    STEPPING = "stepping"
    """The world is playing an action."""
    FINISHED = "finished"
    """The episode has ended; its last answer can still be asked for."""
    BROKEN = "broken"
    """Something failed half way; the episode is void."""


class SessionEvent(StrEnum):
    """What happens to a session."""

    OPENED = "opened"
    STEP = "step"
    ANSWERED = "answered"
    ENDED = "ended"
    FAILED = "failed"


_NEXT: Mapping[SessionState, Mapping[SessionEvent, SessionState]] = {
    SessionState.OPENING: {
        SessionEvent.OPENED: SessionState.READY,
        SessionEvent.FAILED: SessionState.BROKEN,
    },
    SessionState.READY: {
        SessionEvent.STEP: SessionState.STEPPING,
        SessionEvent.FAILED: SessionState.BROKEN,
    },
    SessionState.STEPPING: {
        SessionEvent.ANSWERED: SessionState.READY,
        SessionEvent.ENDED: SessionState.FINISHED,
        SessionEvent.FAILED: SessionState.BROKEN,
    },
}


def after(state: SessionState, event: SessionEvent) -> SessionState:
    """Return the state that `event` leads to.

    Raises:
        ValueError: It cannot happen in `state`.
    """
    try:
        return _NEXT[state][event]
    except KeyError:
        raise ValueError(f"a session that is {state} cannot be {event}") from None


class Opened(NamedTuple):
    """The start of a session's episode, and the session's turn now."""

    turn: int
    start: Reset


@dataclass(frozen=True, slots=True)
class SessionView:
    """A session from outside; `idle_s` are the seconds since anyone used it."""

    id: str
    task: Task
    state: SessionState
    turn: int
    idle_s: float


@runtime_checkable
class ComputingEpisode(Protocol):
    """An episode whose steps only compute: they cannot be waited for, cancelled or overtaken."""

    def step_now(self, action: str) -> Step: ...


class Move(msgspec.Struct):  # structs are made in a third of the time of other objects
    """A step that was begun; `answer` is None while the world plays it."""

    turn: int
    action: str
    answer: Step | EnvkitError | None = None
    settled: anyio.Event | None = None

    async def wait(self) -> None:
        if self.answer is None:
            if self.settled is None:
                self.settled = anyio.Event()
            await self.settled.wait()

    def settle(self, answer: Step | EnvkitError) -> None:
        self.answer = answer
        if self.settled is not None:
            self.settled.set()

    def result(self) -> Step:
        if isinstance(self.answer, EnvkitError):
            raise self.answer.with_traceback(None)
        assert self.answer is not None
        return self.answer


class Session:
    """One session. The task that holds its lease owns it; callers move it."""

    def __init__(self, id: str, task: Task) -> None:
        self.id = id
        self.task = task
        self.state = SessionState.OPENING
        self.turn = 0
        self.is_recalled = False
        """Whether an earlier server began it, and it goes on here."""
        self.used_at = clock.now()
        self.began_at = self.used_at
        """When the reset or the step began that goes on."""
        self.step_began = 0.0
        """When the step began, on the clock for durations."""
        self.start: Reset | None = None
        self.episode: Episode | None = None
        self.computing: ComputingEpisode | None = None
        self.asking: SplitStepEpisode | None = None
        self.move: Move | None = None
        self.error: EnvkitError | None = None
        """What a step in a broken session is told."""
        self.why_interrupted: EnvkitError = SessionBrokenError(f"session {id}: cancelled")
        self.is_interrupted = False
        self.holding = anyio.CancelScope()
        self.stepping: anyio.CancelScope | Future[Raw] | None = None
        """Cancels the step that is under way; None where there is none."""
        self.opened = anyio.Event()
        self.released = anyio.Event()
        self.closed = anyio.Event()

    @property
    def is_over(self) -> bool:
        return self.state in (SessionState.FINISHED, SessionState.BROKEN)

    def happens(self, event: SessionEvent) -> None:
        self.state = after(self.state, event)

    def is_before(self, turn: int) -> bool:
        """Say whether `turn` is the last one that an earlier server played, whose answer we do not have."""
        return self.move is None and turn == self.turn - 1

    def is_next(self, turn: int) -> bool:
        """Say whether a step of this `turn` can begin now."""
        return turn == self.turn and self.state is SessionState.READY

    def repeated(self, turn: int, action: str) -> Move:
        """Return the step that this is a repeat of; it is not one that can begin now.

        Raises:
            SessionConflictError: The turn was played with another action.
            SessionBrokenError: The session is broken.
            StepOrderError: It is neither the last step nor the next one.
        """
        move = self.move
        if move is not None and turn == move.turn and action == move.action:
            return move
        if self.state is SessionState.BROKEN:
            assert self.error is not None
            raise self.error.with_traceback(None)
        if move is not None and turn == move.turn:
            raise SessionConflictError(f"session {self.id}: turn {turn} was played with another action")
        if turn != self.turn or self.state is SessionState.STEPPING:
            raise StepOrderError(f"session {self.id}: expected turn {self.turn}, got {turn}")
        if self.state is SessionState.OPENING:
            raise StepOrderError(f"session {self.id}: a step before the answer to create")
        raise StepOrderError(f"session {self.id}: a step after the end of the episode")

    def begin(self, turn: int, action: str) -> Move:
        self.move = move = Move(turn, action)
        self.began_at = self.used_at
        self.state = after(self.state, SessionEvent.STEP)
        return move

    def play(self, turn: int, action: str, answer: Step | EnvkitError) -> Step:
        """Begin and settle a step that nobody can have seen under way."""
        if isinstance(answer, Step) and not (answer.terminated or answer.truncated):  # in short what follows comes to
            self.move = Move(turn, action, answer)
            self.turn = turn + 1
            return answer
        move = self.begin(turn, action)
        self.settle(move, answer)
        return move.result()

    def settle(self, move: Move, answer: Step | EnvkitError) -> None:
        if isinstance(answer, EnvkitError):
            self.happens(SessionEvent.FAILED)
            self.error = answer
            if not isinstance(answer, SessionBrokenError):
                why = answer.for_callers() if isinstance(answer, EnvError) else answer
                self.error = SessionBrokenError(f"session {self.id} broke at turn {move.turn}: {why}")
        else:
            self.turn += 1
            self.state = after(self.state, SessionEvent.ENDED if answer.ended else SessionEvent.ANSWERED)
        if self.state is not SessionState.READY:
            self.released.set()
        move.settle(answer)

    def interrupt(self, why: EnvkitError) -> None:
        """Stop the step that is under way; it is told `why`, even if its answer came in the same moment."""
        assert self.stepping is not None
        self.why_interrupted = why
        self.is_interrupted = True
        self.stepping.cancel()

    def end(self, why: EnvkitError) -> None:
        """Let go of the place, stopping what goes on in it."""
        if self.state is SessionState.OPENING:
            self.why_interrupted = why
            self.holding.cancel()
        elif self.state is SessionState.STEPPING:
            self.interrupt(why)
        else:
            self.released.set()

    def view(self, now: float) -> SessionView:
        return SessionView(self.id, self.task, self.state, self.turn, max(0.0, now - self.used_at))
