"""Sessions: episodes with ids, which callers play over connections that may break at any time.

The caller chooses the id of a session and numbers its steps, so all calls can be repeated. `SessionTable` guarantees:

* `create` with the id and task of an existing session returns the same first observation. With another task, the
  call is rejected.
* `step` with the same turn and action returns the same answer or error, and the environment steps once. A repeat waits
  while the first call is in progress. The same turn with another action is rejected, and so is any other turn.
* A step that is cancelled, times out or fails breaks its session, since the state of the environment is unknown.
* `create` does not wait for a free slot: if all slots are in use, or all those of the part of the host that plays the
  environment, the call fails immediately.
* A session uses a slot of the host from reset to the end of the episode, and until its grader has run if it has one.
  Its last answer and its grade stay available until the session is deleted or expires.

One background task, the sweeper, checks all sessions for timeouts. This is cheaper than a timer for each step.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Self

import anyio
from anyio.abc import TaskGroup

from envkit import clock
from envkit.errors import (
    CapacityError,
    DeadlineError,
    EnvkitError,
    SessionBrokenError,
    SessionConflictError,
    SessionNotFoundError,
    StepOrderError,
    UnreachableError,
)
from envkit.http.sessions.session import Move, Session, SessionState
from envkit.http.sessions.stepper import SessionCounters, Stepper, attributed
from envkit.protocols import EnvHost, Episode
from envkit.types import Reset, Step, Task, TenantKey, deadline_s

TTL_S = 600.0
"""Default time without a call after which a session expires, in seconds."""

STEP_TIMEOUT_S = 300.0
"""Default timeout of a step, in seconds."""

RESET_TIMEOUT_S = GRADE_TIMEOUT_S = 600.0
"""Default timeouts of a reset and of a grader, in seconds."""

_MAX_SWEEP_S = 1.0
_CLOSING_S = 5.0

_log = logging.getLogger(__name__)


class _VoidError(EnvkitError):
    """Raised inside the lease of a broken session, so that the host does not reuse the environment."""


class SessionTable:
    """All sessions of a server. Use it with ``async with``: leaving the block ends all sessions.

    The arguments are those of `envkit.http.api.app.create_app`. The timeout of a reset includes the wait for its slot.

    Attributes:
        host: Plays the episodes.
        counters: Counters of sessions, steps and errors.
        is_draining: Whether new sessions are refused, because the server will shut down when the others have ended.
        is_closing: Whether the server is shutting down. Callers of the table must then start no sessions or steps.
        now: Function that reads the event loop's clock.
    """

    now: Callable[[], float]

    def __init__(
        self,
        host: EnvHost,
        *,
        ttl_s: float = TTL_S,
        step_timeout_s: float = STEP_TIMEOUT_S,
        reset_timeout_s: float = RESET_TIMEOUT_S,
        grade_timeout_s: float = GRADE_TIMEOUT_S,
        tenant_share: float = 1.0,
    ) -> None:
        if min(ttl_s, step_timeout_s, reset_timeout_s, grade_timeout_s) <= 0:
            times = (ttl_s, step_timeout_s, reset_timeout_s, grade_timeout_s)
            raise ValueError(f"ttl_s and the timeouts must be above 0, got {', '.join(map(str, times))}")
        self.counters = SessionCounters()
        self.is_draining = self.is_closing = False
        self.host = host
        self._ttl_s = ttl_s
        self._timeouts_s = {
            SessionState.OPENING: ("reset", reset_timeout_s),
            SessionState.STEPPING: ("step", step_timeout_s),
            SessionState.GRADING: ("grader", grade_timeout_s),
        }
        self._sessions: dict[TenantKey, Session] = {}
        self._leased: Counter[tuple[str, str]] = Counter()
        """Slots in use, by part of the host and tenant."""
        self._tenant_share = tenant_share
        self._resuming: dict[TenantKey, Task] = {}
        """Tasks of the sessions that are being resumed."""
        self._kept_alive: list[set[TenantKey]] = []
        self._computing = anyio.Lock()
        self._tasks: TaskGroup  # created in __aenter__, because it needs a running event loop
        self._has_sessions: anyio.Event
        self._stepper: Stepper

    @property
    def leased(self) -> int:
        """Number of slots in use. A session whose episode has ended uses no slot."""
        return self._leased.total()

    def slots_of(self, tenant: str) -> tuple[int, int]:
        """Return how many slots the tenant uses, and how many it may use. Callers without a token may use all."""
        capacity = self.host.capacity
        limit = max(int(capacity * self._tenant_share), 1) if tenant else capacity
        used = sum(count for (_, name), count in self._leased.items() if name == tenant)
        return used, min(limit, capacity)

    def can_resume(self, key: TenantKey) -> bool:
        """Return whether this is a session of an earlier server process that can be resumed, but is not yet."""
        return key in self._resuming or (key not in self._sessions and self.host.resumable_task(key) is not None)

    async def create(self, key: TenantKey, task: Task) -> tuple[int, Reset]:
        """Start a session, or find that with the same task; return its current turn and its first observation.

        Cancelling the caller does not cancel the session. If the reset fails, all calls that wait for the reset raise
        its error. If no call waits, the next call for this id raises the error. After that, the id can be used again.

        Raises:
            SessionConflictError: The id belongs to a session with another task.
            CapacityError: All slots are in use.
            UnreachableError: The server is shutting down.
            UnknownEnvError: No environment has the task's id.
            DeadlineError: The reset timed out.
            EnvkitError: The host's lease or the environment's reset failed with this error.
        """
        session = self._sessions.get(key)
        if session is None:
            session = self._open(key, task)
        elif session.task != task:
            raise SessionConflictError(f"session {key.id} plays another task")
        session.used_at = self.now()
        await session.opened.wait()
        if session.start is None:
            if self._sessions.get(key) is session:
                del self._sessions[key]
            assert session.error is not None
            raise session.error.with_traceback(None)
        return session.turn, session.start

    def step_now(self, key: TenantKey, turn: int, action: str, now: float) -> Step | None:
        """Play a step, or return its answer again, without waiting; None if this call would have to wait.

        The arguments are those of `step`; `now` is the current time, `self.now()`.
        """
        if (self._resuming or key not in self._sessions) and self.can_resume(key):
            return None
        session = self._sessions.get(key) or self.get(key)
        session.used_at = now
        # This is the body of `session.is_next`, inlined to save time in every step.
        if turn == session.turn and session.state is SessionState.READY:
            return self._stepper.compute(session, turn, action)
        if session.is_resumed and session.is_previous(turn):
            return None
        move = session.find_repeat(turn, action)
        return None if move.answer is None else move.result()

    def start_step(self, key: TenantKey, turn: int, action: str, settled: Callable[[Move], None]) -> bool:
        """Start a step that `step_now` cannot play, and call `settled` when the step has ended; see `step`.

        Returns:
            False if no step was started, because only `step` can play this step.
        """
        session = None if self.can_resume(key) else self._sessions.get(key)
        if session is None or not session.is_next(turn):
            return False
        session.used_at = self.now()
        return self._stepper.start_step(session, turn, action, settled)

    async def step(self, key: TenantKey, turn: int, action: str) -> Step:
        """Play step number `turn`, or return its answer again.

        Raises:
            SessionNotFoundError: No session has this id.
            SessionConflictError: The turn was played with another action.
            StepOrderError: `turn` is neither the last turn nor the next one, or the episode is over.
            SessionBrokenError: An earlier step failed or was cancelled, or this step was cancelled.
            DeadlineError: The step timed out.
            EnvError: The environment raised an error.
            SandboxLostError: The sandbox of the environment is lost.
        """
        if self.can_resume(key):
            await self._resume(key, turn)
        answer = self.step_now(key, turn, action, self.now())
        if answer is not None:
            return answer
        session = self.get(key)
        if session.is_next(turn):
            move = session.begin(turn, action)
            await self._stepper.play(session, move)
        elif session.is_resumed and session.is_previous(turn):
            return await self._repeat_last_step(session, action)
        else:
            move = session.find_repeat(turn, action)
            await move.wait()
        return move.result()

    async def grade(self, key: TenantKey) -> float | None:
        """Run the grader of an episode, or return its result again; see `envkit.protocols.Episode.grade`.

        The episode ends, if it has not ended yet. Cancelling the caller does not cancel the grader.

        Raises:
            SessionNotFoundError: No session has this id.
            StepOrderError: The episode has no grader, or its reset or a step is in progress.
            SessionBrokenError: An earlier step failed or was cancelled.
            DeadlineError: The grader timed out.
            EnvError: The environment raised an error.
            SandboxLostError: The sandbox of the environment is lost.
        """
        if self.can_resume(key):
            await self._resume(key)
        session = self.get(key)
        session.used_at = self.now()
        if session.state is not SessionState.GRADING and not session.graded.is_set():
            session.begin_grade()
        await session.graded.wait()
        if session.grade_error is not None:
            raise session.grade_error.with_traceback(None)
        return session.grade

    async def delete(self, key: TenantKey) -> None:
        """End a session and wait until its slot is free. The call is safe to repeat."""
        if self.can_resume(key):
            await self._resume(key)
        session = self._sessions.pop(key, None)
        if session is not None:
            session.end(SessionNotFoundError(f"session {key.id} was deleted"))
            await session.closed.wait()

    def get(self, key: TenantKey) -> Session:
        """Return a session, for its state. The call does not count as a use of the session, so it may still expire.

        Raises:
            SessionNotFoundError: No session has this id.
        """
        try:
            return self._sessions[key]
        except KeyError:
            raise SessionNotFoundError(
                f"no session {key.id}: it was never created, was deleted or has expired"
            ) from None

    def turn(self, key: TenantKey) -> int | None:
        """Return the turn of a session; None if no session has this id."""
        session = self._sessions.get(key)
        return None if session is None else session.turn

    def all(self) -> Sequence[Session]:
        """Return all sessions, oldest first."""
        return list(self._sessions.values())

    @contextmanager
    def keep_alive(self, keys: set[TenantKey]) -> Iterator[None]:
        """Prevent sessions from expiring during the block while their episodes run.

        Args:
            keys: Session keys. The caller may add keys during the block; keys of finished sessions are removed.
        """
        self._kept_alive.append(keys)
        try:
            yield
        finally:
            self._kept_alive = [kept for kept in self._kept_alive if kept is not keys]

    async def __aenter__(self) -> Self:
        self.now = clock.reader()
        self._has_sessions = anyio.Event()
        self._tasks = await anyio.create_task_group().__aenter__()
        self._stepper = Stepper(self.counters, self.now, clock.precise_reader(), self._tasks)
        self._tasks.start_soon(self._sweep)
        # Resume the sessions of the earlier server process now, so that they count as used slots and can expire.
        for key in self.host.resumable_keys():
            self._tasks.start_soon(self._resume_or_drop, key)
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        sessions, self._sessions = self._sessions, {}
        for session in sessions.values():
            session.end(SessionBrokenError(f"session {session.id}: the server stopped"))
        with anyio.move_on_after(_CLOSING_S, shield=True):
            for session in sessions.values():
                await session.closed.wait()
        await clock.end_tasks(self._tasks, error)

    def _open(self, key: TenantKey, task: Task) -> Session:
        if self.is_draining and key not in self._resuming:
            raise UnreachableError("the server is shutting down and starts no sessions; retry later")
        tenant, capacity = key.tenant, self.host.capacity
        # If the host has no slots at all, continue here: the lease will fail with an error that says why.
        if self._leased.total() >= capacity > 0:
            raise CapacityError(f"all {capacity} slots are in use; retry later")
        part = self._check_part(task.env_id, tenant)
        used, limit = self.slots_of(tenant)
        if used >= limit > 0:
            raise CapacityError(f"this tenant uses {used} of {capacity} slots (its limit); retry later")
        self._leased[part, tenant] += 1
        self.counters.sessions += 1
        session = self._sessions[key] = Session(key, task, part)
        if not self._has_sessions.is_set():
            self._has_sessions.set()
        self._tasks.start_soon(self._hold_lease, session)
        return session

    def _check_part(self, env_id: str, tenant: str) -> str:
        """Return the part of the host that plays an environment; raise `CapacityError` without a free slot of it."""
        part, slots = self.host.partition_of(env_id, tenant)
        if not part:
            return part
        if sum(count for (name, _), count in self._leased.items() if name == part) >= slots > 0:
            raise CapacityError(f"all {slots} slots for {part} are in use; retry later")
        limit = max(int(slots * self._tenant_share), 1) if tenant else slots
        if self._leased[part, tenant] >= limit > 0:
            raise CapacityError(f"this tenant uses {limit} of {slots} slots for {part} (its limit); retry later")
        return part

    async def _hold_lease(self, session: Session) -> None:
        """Lease and reset the session's episode, and hold the lease until the session releases it."""
        failure: EnvkitError = session.interrupt_error
        try:
            with session.lease_scope:
                async with self.host.lease_as(session.key, session.task) as episode:
                    session.episode = episode
                    if not episode.computes:
                        session.start = await episode.reset()
                    else:
                        # Run one reset at a time: a thousand concurrent resets would each generate a level and block
                        # the server.
                        async with self._computing:
                            session.start = await episode.reset()
                    session.used_at = self.now()
                    if episode.turn:
                        session.turn, session.is_resumed = episode.turn, True
                    session.state = SessionState.READY
                    session.opened.set()
                    await session.released.wait()
                    if session.state is SessionState.GRADING:
                        await self._grade(session, episode)
                    if session.state is SessionState.BROKEN:
                        raise _VoidError(f"session {session.id} is broken, so its environment must not be reused")
            if session.lease_scope.cancelled_caught:
                failure = session.interrupt_error
        except Exception as error:
            failure = attributed(error, session.task)
            if session.is_over and not isinstance(error, _VoidError):
                _log.warning("session %s: releasing its slot failed: %s", session.key, failure)
        finally:
            self._leased[session.part, session.key.tenant] -= 1
            self._break_unfinished(session, failure)
            session.opened.set()
            session.closed.set()

    async def _grade(self, session: Session, episode: Episode) -> None:
        assert isinstance(session.stepping, anyio.CancelScope)
        answer: float | EnvkitError | None = session.interrupt_error
        try:
            with session.stepping:
                answer = await episode.grade()
        except Exception as error:
            answer = attributed(error, session.task)
        session.used_at = self.now()
        session.settle_grade(session.interrupt_error if session.is_interrupted else answer)

    async def _resume(self, key: TenantKey, turn: int = 0) -> None:
        """Resume a session of an earlier server process. `turn` is the turn that the caller wants to play.

        Raises:
            SessionNotFoundError: The old episode has expired, so the host has started a new one, but `turn` is not 0.
        """
        task = self._resuming.get(key) or self.host.resumable_task(key)
        if task is None:
            return
        self._resuming[key] = task
        try:
            found, _ = await self.create(key, task)
        finally:
            self._resuming.pop(key, None)
        if found == 0 < turn:
            await self.delete(key)
            self.get(key)

    async def _resume_or_drop(self, key: TenantKey) -> None:
        try:
            await self._resume(key)
        except EnvkitError as error:
            _log.warning("cannot resume session %s of an earlier server process: %s", key, error)

    async def _repeat_last_step(self, session: Session, action: str) -> Step:
        """Return the answer to the last step before the session was resumed. `action` must be the step's action."""
        if session.state is not SessionState.READY or session.episode is None:
            raise StepOrderError(f"session {session.id}: cannot repeat the last step; expected turn {session.turn}")
        turn = session.turn
        move = Move(turn - 1, action)
        move.settle(await session.episode.repeat_step(action))
        if session.turn == turn and session.move is None:  # no other step began during the await above
            session.move = move
        return move.result()

    def _break_unfinished(self, session: Session, failure: EnvkitError) -> None:
        """Break a session whose lease has ended although its episode has not."""
        if session.state is SessionState.STEPPING:
            session.interrupt(failure)
        elif session.state is SessionState.GRADING:
            session.settle_grade(failure)
        elif session.state in (SessionState.OPENING, SessionState.READY, SessionState.UNGRADED):
            session.error = failure
            session.state = SessionState.BROKEN

    async def _sweep(self) -> None:
        shortest_s = min(self._ttl_s, *(timeout_s for _, timeout_s in self._timeouts_s.values()))
        interval_s = min(_MAX_SWEEP_S, shortest_s / 4)
        while True:
            # Sleep while there are no sessions: a machine may run a thousand idle servers, which must use no CPU time.
            if not self._sessions:
                self._has_sessions = anyio.Event()
                await self._has_sessions.wait()
            await anyio.sleep(interval_s)
            now = self.now()
            alive = {key for key, session in self._sessions.items() if not session.is_over}
            for keys in self._kept_alive:
                keys &= alive
                for key in keys:
                    self._sessions[key].used_at = now
            for session in list(self._sessions.values()):
                if (timeout := self._timeouts_s.get(session.state)) is not None:
                    what, timeout_s = timeout[0], deadline_s(timeout[1], session.limit_s)
                    if now - session.began_at >= timeout_s:
                        session.end(DeadlineError(f"the {what} exceeded its timeout of {timeout_s:g} s"))
                elif now - session.used_at >= self._ttl_s:
                    del self._sessions[session.key]
                    session.end(SessionNotFoundError(f"session {session.id} has expired"))
