"""One session: its state, its turn, and its last answer, which a call that repeats the last step gets again."""

from __future__ import annotations

from asyncio import Future
from enum import StrEnum

import anyio
import msgspec
from msgspec import Raw

from envkit import clock
from envkit.errors import EnvError, EnvkitError, SessionBrokenError, SessionConflictError, StepOrderError
from envkit.protocols import Episode
from envkit.types import Reset, Step, Task, TenantKey


class SessionState(StrEnum):
    """The state of a session."""

    OPENING = "opening"
    """The session waits for its slot, or for the reset of its environment."""
    READY = "ready"
    """The session waits for the next action."""
    STEPPING = "stepping"
    """The environment is playing an action."""
    UNGRADED = "ungraded"
    """The episode has ended, and its grader has not run yet."""
    GRADING = "grading"
    """The grader of the episode is running."""
    FINISHED = "finished"
    """The episode has ended; its last answer can still be requested."""
    BROKEN = "broken"
    """A reset, step or grader failed, and the episode cannot continue."""


# Creating a msgspec struct takes a third of the time of creating an ordinary object.
class Move(msgspec.Struct):
    """A step of a session. `answer` is None while the step is in progress."""

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
    """One session. A task of its own holds the lease of its episode; the tasks of callers play the steps."""

    def __init__(self, key: TenantKey, task: Task, part: str = "") -> None:
        self.key = key
        self.id = key.id
        """The id without the tenant, for error messages."""
        self.task = task
        self.part = part
        """The part of the host that plays the episode."""
        self.state = SessionState.OPENING
        self.turn = 0
        self.is_resumed = False
        """Whether an earlier server process started the session, and this process has resumed it."""
        self.used_at = clock.now()
        self.began_at = self.used_at
        """When the current reset, step or grader began, on the event loop's clock."""
        self.step_began = 0.0
        """When the current step began, on the finer clock `envkit.clock.precise`."""
        self.start: Reset | None = None
        self.episode: Episode | None = None
        self.move: Move | None = None
        self.error: EnvkitError | None = None
        """The error that steps raise while the session is broken."""
        self.interrupt_error: EnvkitError = SessionBrokenError(f"session {key.id}: cancelled")
        self.is_interrupted = False
        self.lease_scope = anyio.CancelScope()
        self.stepping: anyio.CancelScope | Future[Raw] | None = None
        """Object whose method `cancel` cancels the step or grader in progress; None if none is in progress."""
        self.grade: float | None = None
        self.grade_error: EnvkitError | None = None
        """The error that calls of `grade` raise after the grader has failed."""
        self.graded = anyio.Event()
        self.opened = anyio.Event()
        self.released = anyio.Event()
        self.closed = anyio.Event()

    @property
    def is_over(self) -> bool:
        return self.state in (SessionState.FINISHED, SessionState.BROKEN)

    @property
    def idle_s(self) -> float:
        """Seconds since the last use of the session."""
        return max(0.0, clock.now() - self.used_at)

    @property
    def is_graded(self) -> bool:
        """Whether the episode has a grader. It is unknown, and false, before the reset has returned."""
        return self.start is not None and self.start.is_graded

    @property
    def limit_s(self) -> float | None:
        """The environment's own limit of what is in progress, in seconds; None for no limit."""
        if self.start is None:
            return None
        return self.start.grade_limit_s if self.state is SessionState.GRADING else self.start.step_limit_s

    def is_previous(self, turn: int) -> bool:
        """Return whether `turn` is the last turn that an earlier server process played. Its answer is not stored."""
        return self.move is None and turn == self.turn - 1

    def is_next(self, turn: int) -> bool:
        """Return whether a step with this `turn` can begin now."""
        return turn == self.turn and self.state is SessionState.READY

    def find_repeat(self, turn: int, action: str) -> Move:
        """Return the earlier step that a call repeats. Call this only if `is_next` is false for the turn.

        Raises:
            SessionConflictError: The turn was played with another action.
            SessionBrokenError: The session is broken.
            StepOrderError: `turn` is not the last turn that was played, or no step is possible now.
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
            raise StepOrderError(f"session {self.id}: the first step must wait until create has returned")
        raise StepOrderError(f"session {self.id}: step after the end of the episode")

    def begin(self, turn: int, action: str) -> Move:
        self.move = move = Move(turn, action)
        self.began_at = self.used_at
        self.state = SessionState.STEPPING
        return move

    def play(self, turn: int, action: str, answer: Step | EnvkitError) -> Step:
        """Record a step that was played synchronously and is already finished, and return its answer."""
        # Take a shortcut in the most frequent case. The result is the same as that of the code below.
        if isinstance(answer, Step) and not (answer.terminated or answer.truncated):
            self.move = Move(turn, action, answer)
            self.turn = turn + 1
            return answer
        move = self.begin(turn, action)
        self.settle(move, answer)
        return move.result()

    def settle(self, move: Move, answer: Step | EnvkitError) -> None:
        if isinstance(answer, EnvkitError):
            self.state = SessionState.BROKEN
            self.error = answer
            if not isinstance(answer, SessionBrokenError):
                why = answer.for_callers() if isinstance(answer, EnvError) else answer
                self.error = SessionBrokenError(f"session {self.id} broke at turn {move.turn}: {why}")
        else:
            self.turn += 1
            if not (answer.terminated or answer.truncated):
                self.state = SessionState.READY
            else:
                self.state = SessionState.UNGRADED if self.is_graded else SessionState.FINISHED
        if self.is_over:
            self.released.set()
        move.settle(answer)

    def begin_grade(self) -> None:
        """Let the task that holds the lease run the grader. Call this only if the grader has not begun yet.

        Raises:
            StepOrderError: The episode has no grader, or its reset or a step is in progress.
            SessionBrokenError: The session is broken.
        """
        if self.state is SessionState.BROKEN:
            assert self.error is not None
            raise self.error.with_traceback(None)
        if self.state in (SessionState.OPENING, SessionState.STEPPING):
            raise StepOrderError(f"session {self.id}: grade must wait until the call in progress has returned")
        if not self.is_graded:
            raise StepOrderError(f"session {self.id}: its episode has no grader, because its reset is not is_graded")
        self.state = SessionState.GRADING
        self.began_at = self.used_at
        self.stepping = anyio.CancelScope()
        self.released.set()

    def settle_grade(self, answer: float | EnvkitError | None) -> None:
        self.stepping = None
        if isinstance(answer, EnvkitError):
            self.state = SessionState.BROKEN
            self.error = self.grade_error = answer
        else:
            self.state = SessionState.FINISHED
            self.grade = answer
        self.graded.set()

    def interrupt(self, why: EnvkitError) -> None:
        """Cancel the step or grader in progress. Its caller gets the error `why`, even if an answer has arrived."""
        assert self.stepping is not None
        self.interrupt_error = why
        self.is_interrupted = True
        self.stepping.cancel()

    def end(self, why: EnvkitError) -> None:
        """End the session: cancel its reset, step or grader in progress, whose callers get the error `why`; free the
        slot.
        """
        if self.state is SessionState.OPENING:
            self.interrupt_error = why
            self.lease_scope.cancel()
        elif self.state in (SessionState.STEPPING, SessionState.GRADING):
            self.interrupt(why)
        else:
            self.released.set()
