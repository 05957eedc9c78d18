"""Sessions: named episodes of callers whose connection may break at any time.

The caller chooses the id of a session and numbers its steps, so all calls can be repeated. `SessionTable` guarantees:

* `create` with the same id and task returns the same start; with another task it is rejected.
* `step` with the same turn and action returns the same answer or error, and the environment steps once. A repeat waits
  while the first call is in progress. The same turn with another action is rejected, and so is any other turn.
* A step that is cancelled, times out or fails breaks its session, since the state of the environment is unknown.
* `create` does not queue: if the host is full, it fails immediately.
* One task holds a lease from reset to the end of the episode. An ended episode releases its slot at once; its last
  answer stays until the session is deleted or expires.

One sweeper checks all sessions at intervals, instead of a timer for each step.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from types import TracebackType
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
)
from envkit.http.auth.caller import tenant_of
from envkit.http.sessions.counters import SessionCounters
from envkit.http.sessions.session import (
    ComputingEpisode,
    Move,
    Opened,
    Session,
    SessionEvent,
    SessionState,
    SessionView,
)
from envkit.http.sessions.stepper import Stepper, attributed
from envkit.protocols import EnvHost, Episode, ResumableEpisode, ResumableHost, SplitStepEpisode
from envkit.types import Step, Task

TTL_S = 600.0
"""Default time without a call after which a session expires, in seconds."""

STEP_TIMEOUT_S = 300.0
"""Default timeout of a step, in seconds."""

_MAX_SWEEP_S = 1.0
_CLOSING_S = 5.0

_log = logging.getLogger(__name__)


class _VoidError(EnvkitError):
    """Raised inside a lease so that the host does not reuse the environment."""


class SessionTable:
    """All sessions of a server. Entering it starts its sweeper; leaving it releases every lease.

    Args:
        host: Plays the episodes.
        ttl_s: Seconds without a call after which a session expires; also the timeout of a reset.
        step_timeout_s: Seconds after which a step is cancelled with a `DeadlineError`, which breaks its session.
        tenant_share: Share of the slots that one tenant may use; one slot is always allowed.

    Attributes:
        host: Plays the episodes.
        counters: Counters of sessions, steps and errors.
        is_closing: Set while the server shuts down: running steps finish, no session is created.
        now: Reads the event loop's clock.
    """

    now: Callable[[], float]

    def __init__(
        self,
        host: EnvHost,
        *,
        ttl_s: float = TTL_S,
        step_timeout_s: float = STEP_TIMEOUT_S,
        tenant_share: float = 1.0,
    ) -> None:
        if ttl_s <= 0 or step_timeout_s <= 0:
            raise ValueError(f"ttl_s and step_timeout_s must be above 0, got {ttl_s} and {step_timeout_s}")
        self.counters = SessionCounters()
        self.is_closing = False
        self.host = host
        self._resumable = host if isinstance(host, ResumableHost) else None
        self._ttl_s = ttl_s
        self._step_timeout_s = step_timeout_s
        self._sessions: dict[str, Session] = {}
        self._leased: Counter[str] = Counter()
        """Slots in use, by tenant."""
        self._tenant_share = tenant_share
        self._resuming: dict[str, Task] = {}
        """Tasks of the sessions that are being resumed, by session id."""
        self._kept_alive: list[set[str]] = []
        self._computing = anyio.Lock()
        self._tasks: TaskGroup  # created on entering, because it needs a running event loop
        self._has_sessions: anyio.Event
        self._stepper: Stepper

    @property
    def capacity(self) -> int:
        return self.host.capacity

    @property
    def leased(self) -> int:
        """Number of slots in use; a session whose episode has ended uses no slot."""
        return self._leased.total()

    def can_resume(self, id: str) -> bool:
        """Whether the host still plays this session for an earlier server process and it is not resumed yet."""
        if self._resumable is None:
            return False
        return id in self._resuming or (id not in self._sessions and self._resumable.resumable_task(id) is not None)

    async def create(self, id: str, task: Task) -> Opened:
        """Start a session, or return its start again. Cancelling the caller does not cancel the session.

        If the reset fails, the calls that wait for it raise the error, or else the next call does. The id is then free.

        Raises:
            SessionConflictError: The id belongs to a session with another task.
            CapacityError: All slots are in use.
            UnknownEnvError: Raised by the host, like all other errors of a lease or a reset.
            DeadlineError: The reset timed out.
        """
        session = self._sessions.get(id)
        if session is None:
            session = self._open(id, task)
        elif session.task != task:
            raise SessionConflictError(f"session {id} plays another task")
        session.used_at = self.now()
        await session.opened.wait()
        if session.start is None:
            if self._sessions.get(id) is session:
                del self._sessions[id]
            assert session.error is not None
            raise session.error.with_traceback(None)
        return Opened(session.turn, session.start)

    def step_now(self, id: str, turn: int, action: str, now: float) -> Step | None:
        """Play or repeat a step if that needs no waiting, else return None; see `step`. `now` is `self.now()`."""
        if self._resumable is not None and self.can_resume(id):
            return None
        session = self._sessions.get(id) or self._find(id)
        session.used_at = now
        if turn == session.turn and session.state is SessionState.READY:  # `is_next`, inlined: a third of its time
            return self._stepper.compute(session, turn, action)
        if session.is_resumed and session.is_previous(turn):
            return None
        move = session.find_repeat(turn, action)
        return None if move.answer is None else move.result()

    def start_step(self, id: str, turn: int, action: str, settled: Callable[[Move], None]) -> bool:
        """Start a step that `step_now` cannot play, and call `settled` when it is played; see `step`.

        Returns:
            False if only `step` can play it; then nothing was done.
        """
        session = None if self.can_resume(id) else self._sessions.get(id)
        if session is None or not session.is_next(turn):
            return False
        session.used_at = self.now()
        return self._stepper.start_step(session, turn, action, settled)

    async def step(self, id: str, turn: int, action: str) -> Step:
        """Play step number `turn`, or return its answer again.

        Raises:
            SessionNotFoundError: No session has this id.
            SessionConflictError: The turn was played with another action.
            StepOrderError: `turn` is neither the last nor the next one, or the episode is over.
            SessionBrokenError: An earlier step failed or was cancelled, or this one was.
            DeadlineError: The step timed out.
            EnvError: The environment raised.
            SandboxLostError: The sandbox of the environment is lost.
        """
        if self.can_resume(id):
            await self._resume(id, turn)
        answer = self.step_now(id, turn, action, self.now())
        if answer is not None:
            return answer
        session = self._find(id)
        if session.is_next(turn):
            move = session.begin(turn, action)
            await self._stepper.play(session, move)
        elif session.is_resumed and session.is_previous(turn):
            return await self._repeat_last_step(session, action)
        else:
            move = session.find_repeat(turn, action)
            await move.wait()
        return move.result()

    async def delete(self, id: str) -> None:
        """End a session and wait until its slot is free; safe to repeat."""
        if self.can_resume(id):
            await self._resume(id)
        session = self._sessions.pop(id, None)
        if session is not None:
            session.end(SessionNotFoundError(f"session {id} was deleted"))
            await session.closed.wait()

    def get(self, id: str) -> SessionView:
        """Return the state of a session without using it.

        Raises:
            SessionNotFoundError: No session has this id.
        """
        return self._find(id).view(self.now())

    def turn(self, id: str) -> int | None:
        """Return the turn of a session; None if no session has this id."""
        session = self._sessions.get(id)
        return None if session is None else session.turn

    def views(self) -> list[SessionView]:
        """Return the state of all sessions, oldest first."""
        now = self.now()
        return [session.view(now) for session in self._sessions.values()]

    @contextmanager
    def keep_alive(self, ids: set[str]) -> Iterator[None]:
        """Keep the sessions in `ids` from expiring during the block, as long as their episodes last.

        Args:
            ids: Session ids. The caller may add ids during the block; ids of finished sessions are removed.
        """
        self._kept_alive.append(ids)
        try:
            yield
        finally:
            self._kept_alive = [kept for kept in self._kept_alive if kept is not ids]

    async def __aenter__(self) -> Self:
        self.now = clock.reader()
        self._has_sessions = anyio.Event()
        self._tasks = await anyio.create_task_group().__aenter__()
        self._stepper = Stepper(self.counters, self.now, clock.precise_reader(), self._tasks)
        self._tasks.start_soon(self._sweep)
        if self._resumable is not None:
            # Resume them immediately: they use slots, and expire like all others.
            for id in self._resumable.resumable_keys():
                self._tasks.start_soon(self._resume_or_drop, id)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sessions, self._sessions = self._sessions, {}
        for session in sessions.values():
            session.end(SessionBrokenError(f"session {session.id}: the server stopped"))
        with anyio.move_on_after(_CLOSING_S, shield=True):
            for session in sessions.values():
                await session.closed.wait()
        self._tasks.cancel_scope.cancel()
        # Do not pass the error of the block: the task group would wrap it in an exception group.
        await self._tasks.__aexit__(None, None, None)

    def _open(self, id: str, task: Task) -> Session:
        tenant, capacity = tenant_of(id), self.host.capacity
        if self._leased.total() >= capacity > 0:  # if there are no slots at all, the lease below raises the reason
            raise CapacityError(f"all {capacity} slots are in use; retry later")
        if tenant and self._leased[tenant] >= max(int(capacity * self._tenant_share), 1):
            raise CapacityError(f"this tenant uses {self._leased[tenant]} of {capacity} slots, which is its limit")
        self._leased[tenant] += 1
        self.counters.sessions += 1
        session = self._sessions[id] = Session(id, task)
        if not self._has_sessions.is_set():
            self._has_sessions.set()
        self._tasks.start_soon(self._hold_lease, session)
        return session

    def _find(self, id: str) -> Session:
        try:
            return self._sessions[id]
        except KeyError:
            raise SessionNotFoundError(f"no session {id}: it was never created, was deleted or has expired") from None

    async def _hold_lease(self, session: Session) -> None:
        """Hold the session's lease from reset to the end."""
        failure: EnvkitError = session.interrupt_error
        try:
            with session.lease_scope:
                async with self._lease(session) as episode:
                    session.episode = episode
                    session.computing = episode if isinstance(episode, ComputingEpisode) else None
                    session.split_step = episode if isinstance(episode, SplitStepEpisode) else None
                    if session.computing is None:
                        session.start = await episode.reset()
                    else:
                        # One reset at a time: generating a thousand levels together would block the server.
                        async with self._computing:
                            session.start = await episode.reset()
                    session.used_at = self.now()
                    if isinstance(episode, ResumableEpisode) and episode.turn:
                        session.turn, session.is_resumed = episode.turn, True
                    session.apply(SessionEvent.OPENED)
                    session.opened.set()
                    await session.released.wait()
                    if session.state is SessionState.BROKEN:
                        raise _VoidError(f"session {session.id}: the episode is void")
            if session.lease_scope.cancelled_caught:
                failure = session.interrupt_error
        except Exception as error:
            failure = attributed(error, session.task)
            if session.is_over and not isinstance(error, _VoidError):
                _log.warning("session %s: releasing its slot failed: %s", session.id, failure)
        finally:
            self._leased[tenant_of(session.id)] -= 1
            self._break_unfinished(session, failure)
            session.opened.set()
            session.closed.set()

    def _lease(self, session: Session) -> AbstractAsyncContextManager[Episode]:
        if self._resumable is None:
            return self.host.lease(session.task)
        return self._resumable.lease_as(session.id, session.task)

    async def _resume(self, id: str, turn: int = 0) -> None:
        """Resume a session of an earlier server process.

        Raises:
            SessionNotFoundError: It has expired: the episode restarted and has not reached `turn`.
        """
        assert self._resumable is not None
        task = self._resuming.get(id) or self._resumable.resumable_task(id)
        if task is None:
            return
        self._resuming[id] = task
        try:
            found = await self.create(id, task)
        finally:
            self._resuming.pop(id, None)
        if found.turn == 0 < turn:
            await self.delete(id)
            self._find(id)

    async def _resume_or_drop(self, id: str) -> None:
        try:
            await self._resume(id)
        except EnvkitError as error:
            _log.warning("cannot resume session %s of an earlier server process: %s", id, error)

    async def _repeat_last_step(self, session: Session, action: str) -> Step:
        """Return the answer to the last step before the session was resumed."""
        if session.state is not SessionState.READY or not isinstance(session.episode, ResumableEpisode):
            raise StepOrderError(f"session {session.id}: expected turn {session.turn}")
        turn = session.turn
        move = Move(turn - 1, action)
        move.settle(await session.episode.repeat_step(action))
        if session.turn == turn and session.move is None:  # no other step began meanwhile
            session.move = move
        return move.result()

    def _break_unfinished(self, session: Session, failure: EnvkitError) -> None:
        """Break a session whose lease ended before its episode did."""
        if session.state is SessionState.STEPPING:
            session.interrupt(failure)
        elif session.state in (SessionState.OPENING, SessionState.READY):
            session.error = failure
            session.apply(SessionEvent.FAILED)

    async def _sweep(self) -> None:
        interval_s = min(_MAX_SWEEP_S, self._ttl_s / 4, self._step_timeout_s / 4)
        while True:
            if not self._sessions:  # an idle server must use no CPU time, because a machine may run a thousand of them
                self._has_sessions = anyio.Event()
                await self._has_sessions.wait()
            await anyio.sleep(interval_s)
            now = self.now()
            alive = {id for id, session in self._sessions.items() if not session.is_over}
            for ids in self._kept_alive:
                ids &= alive
                for id in ids:
                    self._sessions[id].used_at = now
            for session in list(self._sessions.values()):
                if session.state is SessionState.STEPPING:
                    if now - session.began_at >= self._step_timeout_s:
                        session.end(DeadlineError(f"the step exceeded its timeout of {self._step_timeout_s:g} s"))
                elif session.state is SessionState.OPENING:
                    if now - session.began_at >= self._ttl_s:
                        session.end(DeadlineError(f"the reset exceeded its timeout of {self._ttl_s:g} s"))
                elif now - session.used_at >= self._ttl_s:
                    del self._sessions[session.id]
                    session.end(SessionNotFoundError(f"session {session.id} has expired"))
