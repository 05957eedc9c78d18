"""Sessions: episodes that are played by name, by a caller whose connection may break at any time.

The caller chooses a session's id and numbers its steps, so every call can be repeated. What `SessionTable` promises:

* `create` with the same id and task gives the same start; a session with another task is refused.
* `step` with the same turn and action gives the same answer, or the same error, and the world moves once. A repeat that
  comes while the first is being played waits for it. The same turn with another action, and any other turn, is refused.
* A step that is cancelled in the world, runs out of time or fails breaks its session: nobody knows what the world did.
* Nothing is queued: where the host is full, `create` says so at once.
* A lease is held by one task from reset to the end of the episode, and by nothing else; an episode that has ended gives
  its place back at once, while its last answer stays until the session is deleted or expires.

One sweeper looks at all sessions at intervals, instead of a timer for each step.
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
"""Seconds without a call after which a session expires, unless the caller of `SessionTable` says otherwise."""

STEP_TIMEOUT_S = 300.0
"""Seconds that a step may take, unless the caller of `SessionTable` says otherwise."""

_MAX_SWEEP_S = 1.0
_CLOSING_S = 5.0

_log = logging.getLogger(__name__)


class _VoidError(EnvkitError):
    """Leaves a lease by the way that tells the host not to use the world again."""


class SessionTable:
    """All sessions of a server. Enter it to start its sweeper; leaving it gives back every lease.

    Args:
        host: Where episodes are played.
        ttl_s: Seconds without a call after which a session expires; also the most that a reset may take.
        step_timeout_s: Seconds after which a step is cancelled with a `DeadlineError`, which breaks its session.
        tenant_share: Share of the places that one tenant may have; a first one it may have in any case.

    Attributes:
        host: Where episodes are played.
        tally: What was counted so far.
        is_closing: Set while the server shuts down: what runs is finished, nothing new is begun.
        now: Reads the loop's clock.
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
        self.tally = SessionCounters()
        self.is_closing = False
        self.host = host
        self._lasting = host if isinstance(host, ResumableHost) else None
        self._ttl_s = ttl_s
        self._step_timeout_s = step_timeout_s
        self._sessions: dict[str, Session] = {}
        self._leased: Counter[str] = Counter()
        """Places that are taken, by tenant."""
        self._tenant_share = tenant_share
        self._recalled: dict[str, Task] = {}
        """What plays in sessions of an earlier server that we are just having again."""
        self._kept: list[set[str]] = []
        self._computing = anyio.Lock()
        self._tasks: TaskGroup  # made on entering, since only then there is a loop
        self._filled: anyio.Event
        self._stepper: Stepper

    @property
    def capacity(self) -> int:
        return self.host.capacity

    @property
    def leased(self) -> int:
        """Number of places that are taken; sessions whose episode has ended take none."""
        return self._leased.total()

    def can_resume(self, id: str) -> bool:
        """Say whether a session goes on in the host, since an earlier server, and we do not have it yet."""
        if self._lasting is None:
            return False
        return id in self._recalled or (id not in self._sessions and self._lasting.resumable_task(id) is not None)

    async def create(self, id: str, task: Task) -> Opened:
        """Start a session, or give its start again. A caller that is cancelled here leaves the session alone.

        A reset that fails is reported to whoever waits for it, or else to the next who asks; then the id is free again.

        Raises:
            SessionConflictError: The id belongs to a session with another task.
            CapacityError: All places are taken.
            UnknownEnvError: From the host, as is whatever else a lease or a reset raises.
            DeadlineError: The reset took too long.
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
        """Play or repeat a step if that needs no waiting, else return None; see `step`. `now` is what `now()` said."""
        if self._lasting is not None and self.can_resume(id):
            return None
        session = self._sessions.get(id) or self._find(id)
        session.used_at = now
        if turn == session.turn and session.state is SessionState.READY:  # as `is_next` says, in a third of its time
            return self._stepper.compute(session, turn, action)
        if session.is_recalled and session.is_before(turn):
            return None
        move = session.repeated(turn, action)
        return None if move.answer is None else move.result()

    def start_step(self, id: str, turn: int, action: str, settled: Callable[[Move], None]) -> bool:
        """Play a step that `step_now` cannot, if it can be asked for, and have `settled` told when it is; see `step`.

        Returns:
            False where `step` has to see to it; then nothing was done.
        """
        session = None if self.can_resume(id) else self._sessions.get(id)
        if session is None or not session.is_next(turn):
            return False
        session.used_at = self.now()
        return self._stepper.start_step(session, turn, action, settled)

    async def step(self, id: str, turn: int, action: str) -> Step:
        """Play step number `turn`, or give its answer again.

        Raises:
            SessionNotFoundError: No such session.
            SessionConflictError: The turn was played with another action.
            StepOrderError: It is neither the last step nor the next one, or the episode is over.
            SessionBrokenError: An earlier step failed or was cancelled, or this one was.
            DeadlineError: The step took too long.
            EnvError: The world raised.
            SandboxLostError: The place it ran in is gone.
        """
        if self.can_resume(id):
            await self._recall(id, turn)
        answer = self.step_now(id, turn, action, self.now())
        if answer is not None:
            return answer
        session = self._find(id)
        if session.is_next(turn):
            move = session.begin(turn, action)
            await self._stepper.play(session, move)
        elif session.is_recalled and session.is_before(turn):
            return await self._again(session, action)
        else:
            move = session.repeated(turn, action)
            await move.wait()
        return move.result()

    async def delete(self, id: str) -> None:
        """End a session and wait until its place is free; safe to repeat."""
        if self.can_resume(id):
            await self._recall(id)
        session = self._sessions.pop(id, None)
        if session is not None:
            session.end(SessionNotFoundError(f"session {id} was deleted"))
            await session.closed.wait()

    def get(self, id: str) -> SessionView:
        """Look at a session without using it.

        Raises:
            SessionNotFoundError: No such session.
        """
        return self._find(id).view(self.now())

    def turn(self, id: str) -> int | None:
        """Return a session's turn, or None where there is no such session."""
        session = self._sessions.get(id)
        return None if session is None else session.turn

    def views(self) -> list[SessionView]:
        """Look at all sessions, oldest first."""
        now = self.now()
        return [session.view(now) for session in self._sessions.values()]

    @contextmanager
    def keeping(self, ids: set[str]) -> Iterator[None]:
        """Inside, the sessions named in `ids` do not expire while their episode lasts.

        Args:
            ids: The caller may add names meanwhile; those of sessions that are over are taken out.
        """
        self._kept.append(ids)
        try:
            yield
        finally:
            self._kept = [kept for kept in self._kept if kept is not ids]

    async def __aenter__(self) -> Self:
        self.now = clock.reader()
        self._filled = anyio.Event()
        self._tasks = await anyio.create_task_group().__aenter__()
        self._stepper = Stepper(self.tally, self.now, clock.precise_reader(), self._tasks)
        self._tasks.start_soon(self._sweep)
        if self._lasting is not None:
            # At once, since they take places, and expire like all others.
            for id in self._lasting.resumable_keys():
                self._tasks.start_soon(self._recall_or_drop, id)
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
        # Not told of the block's own error, which it would wrap in a group.
        await self._tasks.__aexit__(None, None, None)

    def _open(self, id: str, task: Task) -> Session:
        tenant, capacity = tenant_of(id), self.host.capacity
        if self._leased.total() >= capacity > 0:  # of one without any place the lease says why
            raise CapacityError(f"all {capacity} places are taken")
        if tenant and self._leased[tenant] >= max(int(capacity * self._tenant_share), 1):
            raise CapacityError(f"{self._leased[tenant]} of {capacity} places are this tenant's, who may have no more")
        self._leased[tenant] += 1
        self.tally.sessions += 1
        session = self._sessions[id] = Session(id, task)
        if not self._filled.is_set():
            self._filled.set()
        self._tasks.start_soon(self._hold, session)
        return session

    def _find(self, id: str) -> Session:
        try:
            return self._sessions[id]
        except KeyError:
            raise SessionNotFoundError(f"no session {id}: it was never made, was deleted or has expired") from None

    async def _hold(self, session: Session) -> None:
        """Own the session's lease from reset to the end."""
        failure: EnvkitError = session.why_interrupted
        try:
            with session.holding:
                async with self._lease(session) as episode:
                    session.episode = episode
                    session.computing = episode if isinstance(episode, ComputingEpisode) else None
                    session.asking = episode if isinstance(episode, SplitStepEpisode) else None
                    if session.computing is None:
                        session.start = await episode.reset()
                    else:
                        # One a turn of the loop: a thousand levels that are drawn at once must not silence the server.
                        async with self._computing:
                            session.start = await episode.reset()
                    session.used_at = self.now()
                    if isinstance(episode, ResumableEpisode) and episode.turn:
                        session.turn, session.is_recalled = episode.turn, True
                    session.happens(SessionEvent.OPENED)
                    session.opened.set()
                    await session.released.wait()
                    if session.state is SessionState.BROKEN:
                        raise _VoidError(f"session {session.id}: the episode is void")
            if session.holding.cancelled_caught:
                failure = session.why_interrupted
        except Exception as error:
            failure = attributed(error, session.task)
            if session.is_over and not isinstance(error, _VoidError):
                _log.warning("session %s: its place was given back with an error: %s", session.id, failure)
        finally:
            self._leased[tenant_of(session.id)] -= 1
            self._lost(session, failure)
            session.opened.set()
            session.closed.set()

    def _lease(self, session: Session) -> AbstractAsyncContextManager[Episode]:
        if self._lasting is None:
            return self.host.lease(session.task)
        return self._lasting.lease_as(session.id, session.task)

    async def _recall(self, id: str, turn: int = 0) -> None:
        """Have a session again that an earlier server began.

        Raises:
            SessionNotFoundError: It has expired meanwhile; what is there has not come to `turn`.
        """
        assert self._lasting is not None
        task = self._recalled.get(id) or self._lasting.resumable_task(id)
        if task is None:
            return
        self._recalled[id] = task
        try:
            found = await self.create(id, task)
        finally:
            self._recalled.pop(id, None)
        if found.turn == 0 < turn:
            await self.delete(id)
            self._find(id)

    async def _recall_or_drop(self, id: str) -> None:
        try:
            await self._recall(id)
        except EnvkitError as error:
            _log.warning("session %s of an earlier server is gone: %s", id, error)

    async def _again(self, session: Session, action: str) -> Step:
        """Give the answer to the last step before the session was recalled."""
        if session.state is not SessionState.READY or not isinstance(session.episode, ResumableEpisode):
            raise StepOrderError(f"session {session.id}: expected turn {session.turn}")
        turn = session.turn
        move = Move(turn - 1, action)
        move.settle(await session.episode.repeat_step(action))
        if session.turn == turn and session.move is None:  # no other step was begun meanwhile
            session.move = move
        return move.result()

    def _lost(self, session: Session, failure: EnvkitError) -> None:
        """Break a session whose lease ended before its episode did."""
        if session.state is SessionState.STEPPING:
            session.interrupt(failure)
        elif session.state in (SessionState.OPENING, SessionState.READY):
            session.error = failure
            session.happens(SessionEvent.FAILED)

    async def _sweep(self) -> None:
        interval_s = min(_MAX_SWEEP_S, self._ttl_s / 4, self._step_timeout_s / 4)
        while True:
            if not self._sessions:  # an idle server sleeps: there may be a thousand of them on a machine
                self._filled = anyio.Event()
                await self._filled.wait()
            await anyio.sleep(interval_s)
            now = self.now()
            alive = {id for id, session in self._sessions.items() if not session.is_over}
            for ids in self._kept:
                ids &= alive
                for id in ids:
                    self._sessions[id].used_at = now
            for session in list(self._sessions.values()):
                if session.state is SessionState.STEPPING:
                    if now - session.began_at >= self._step_timeout_s:
                        session.end(DeadlineError(f"the step took longer than {self._step_timeout_s:g} s"))
                elif session.state is SessionState.OPENING:
                    if now - session.began_at >= self._ttl_s:
                        session.end(DeadlineError(f"the reset took longer than {self._ttl_s:g} s"))
                elif now - session.used_at >= self._ttl_s:
                    del self._sessions[session.id]
                    session.end(SessionNotFoundError(f"session {session.id} has expired"))
