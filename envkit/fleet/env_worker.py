"""One box of a fleet: its states, its watchers, and the calls that end with it."""

from __future__ import annotations

import logging
from asyncio import Future
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from enum import StrEnum
from socket import socket
from types import TracebackType
from typing import ParamSpec, Protocol, TypeVar

import anyio
from msgspec import Raw

from envkit import clock
from envkit.errors import EnvkitError, SandboxLostError, UnreachableError
from envkit.protocols import ResumableEpisode, SplitStepEpisode
from envkit.types import Cause, CauseKind, Reset, SandboxState, Step, Task

T = TypeVar("T")
P = ParamSpec("P")

_CAUSE_S = 1.0
"""Seconds that a sandbox which cannot be reached has to say what became of it."""
_STOP_S = 15.0
"""Seconds until a sandbox that does not stop is left alone."""

_log = logging.getLogger(__name__)


class EnvSandbox(Protocol):
    """What a fleet needs of a sandbox with an env server in it; see `envkit.protocols.Sandbox`."""

    @property
    def id(self) -> str: ...

    async def connect(self, name: str, /) -> socket: ...

    async def wait(self) -> Cause: ...

    async def stop(self) -> None: ...


class WorkerClient(Protocol):
    """Plays episodes on the server in one box."""

    def lease(self, task: Task, *, id: str | None = None) -> AbstractAsyncContextManager[ResumableEpisode]:
        """Give an episode; that of this name goes on, if there is one of the same task. See `EnvHost.lease`."""
        ...

    async def health(self) -> object:
        """Return once the server has answered.

        Raises:
            UnreachableError: It does not answer.
        """
        ...

    async def heartbeat(self) -> None:
        """Return once the server's process has shown that it runs, be it that its event loop is busy.

        Raises:
            UnreachableError: It does not.
        """
        ...


class LostDuringCallError(SandboxLostError):
    """The box was lost while the call was under way, and perhaps by it. Who plays is told the plain loss."""


class WorkerUnresponsiveError(LostDuringCallError):
    """It was lost since it fell silent."""


class WorkerEvent(StrEnum):
    """What happens to a box."""

    ANSWERED = "answered"
    """Its server answered for the first time."""
    GONE = "gone"
    """It ended, or cannot be reached any more."""
    SILENT = "silent"
    """It says nothing any more."""
    CLOSED = "closed"
    """The fleet needs it no longer."""


_NEXT: Mapping[tuple[SandboxState, WorkerEvent], SandboxState] = {
    (SandboxState.STARTING, WorkerEvent.ANSWERED): SandboxState.READY,
    (SandboxState.STARTING, WorkerEvent.GONE): SandboxState.STOPPED,
    (SandboxState.STARTING, WorkerEvent.CLOSED): SandboxState.STOPPED,
    (SandboxState.READY, WorkerEvent.GONE): SandboxState.LOST,
    (SandboxState.READY, WorkerEvent.SILENT): SandboxState.LOST,
    (SandboxState.READY, WorkerEvent.CLOSED): SandboxState.STOPPED,
    # Several watchers may see the same end.
    (SandboxState.LOST, WorkerEvent.GONE): SandboxState.LOST,
    (SandboxState.LOST, WorkerEvent.SILENT): SandboxState.LOST,
    (SandboxState.LOST, WorkerEvent.CLOSED): SandboxState.LOST,
    (SandboxState.STOPPED, WorkerEvent.GONE): SandboxState.STOPPED,
    (SandboxState.STOPPED, WorkerEvent.SILENT): SandboxState.STOPPED,
    (SandboxState.STOPPED, WorkerEvent.CLOSED): SandboxState.STOPPED,
}


def after(state: SandboxState, event: WorkerEvent) -> SandboxState:
    """Return the state that `event` leads to; only a box that was ready can be lost.

    Raises:
        ValueError: It cannot happen in `state`.
    """
    try:
        return _NEXT[state, event]
    except KeyError:
        raise ValueError(f"a box that is {state} cannot have {event}") from None


class EnvWorker:
    """One box of a fleet, from its start to its end.

    Attributes:
        sandbox: Where its server runs.
        state: Where it is in its life.
        cause: Why it ended; of the kind ``unknown`` until it has.
        gone: Set when it has ended.
        load: Number of episodes that have a place in it.
        served: Number of episodes that were ever given one.
        answered_at: When its server's event loop was last heard, on the clock of the loop.
        process_seen_at: When its server's process was last felt otherwise.
    """

    def __init__(self, sandbox: EnvSandbox) -> None:
        self.sandbox = sandbox
        self.state = SandboxState.STARTING
        self.cause = Cause(CauseKind.UNKNOWN, "it was not connected to")
        self.gone = anyio.Event()
        self.load = 0
        self.served = 0
        self.answered_at = self.process_seen_at = 0.0
        self._client: WorkerClient | None = None
        self._calls: set[anyio.CancelScope] = set()
        self._asked: set[Future[Raw]] = set()
        self._fell_silent = False
        self._silence = anyio.Event()
        self._silence_cause = self.cause

    def open(self, client: WorkerClient) -> None:
        """Take episodes from now on."""
        self.state = after(self.state, WorkerEvent.ANSWERED)
        self._client = client
        self.answered_at = self.process_seen_at = clock.now()

    def lease(self, task: Task, id: str) -> AbstractAsyncContextManager[ResumableEpisode]:
        if self._client is None:
            raise SandboxLostError(self.sandbox.id, self.cause)
        return self._client.lease(task, id=id)

    def end(self, event: WorkerEvent, cause: Cause) -> None:
        """End all calls that are under way in it; only the first cause counts."""
        self.state = after(self.state, event)
        if not self.gone.is_set():
            self.cause = cause
            self._fell_silent = event is WorkerEvent.SILENT
            self.gone.set()
            for call in self._calls:
                call.cancel()
            for answer in self._asked:
                if not answer.done():
                    answer.set_exception(self.loss_during_call())

    def start_step(self, episode: SplitStepEpisode, action: str) -> Future[Raw] | None:
        """Ask an episode in the box for a step; `LostDuringCallError` is the answer if the box ends before.

        Returns:
            None where a call has to find out what is wrong.
        """
        if self.gone.is_set():
            return None
        answer = episode.start_step(action)
        if answer is not None:
            self._asked.add(answer)
            answer.add_done_callback(self._asked.discard)
        return answer

    async def call(self, function: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call something that talks to the box.

        Raises:
            LostDuringCallError: The box goes while the call is under way; `WorkerUnresponsiveError` if it falls silent.
            SandboxLostError: It is gone already.
        """
        if self.gone.is_set():
            raise SandboxLostError(self.sandbox.id, self.cause)
        with self.within_reach():
            try:
                return await function(*args, **kwargs)
            except UnreachableError as error:
                self._silence_cause = Cause(CauseKind.UNRESPONSIVE, f"cannot be reached: {error}")
                self._silence.set()
                await self.gone.wait()  # its watchers find out why, and end this call
        raise self.loss_during_call()

    def loss_during_call(self) -> LostDuringCallError:
        """Return what a call is told that was under way when the box ended."""
        kind = WorkerUnresponsiveError if self._fell_silent else LostDuringCallError
        return kind(self.sandbox.id, self.cause)

    @contextmanager
    def within_reach(self) -> Iterator[None]:
        """Let the end of the box end the block too, quietly."""
        with anyio.CancelScope() as scope:
            if self.gone.is_set():
                scope.cancel()
            self._calls.add(scope)
            try:
                yield
            finally:
                self._calls.discard(scope)

    async def watch_sandbox(self) -> None:
        """Return when the sandbox has said that it is gone."""
        self.end(WorkerEvent.GONE, await self.sandbox.wait())

    async def watch_calls(self) -> None:
        """Return when a call did not get through; the sandbox has a moment to say the true cause first."""
        await self._silence.wait()
        await anyio.sleep(_CAUSE_S)
        self.end(WorkerEvent.GONE, self._silence_cause)


class WorkerLease:
    """A lease of the box's own server, taken and given back within reach of the box's watchers."""

    def __init__(self, box: EnvWorker, task: Task, id: str) -> None:
        self._box = box
        self._lease = box.lease(task, id)

    async def __aenter__(self) -> WatchedEpisode:
        return WatchedEpisode(self._box, await self._box.call(self._lease.__aenter__))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # What was played is played: a box that goes now takes nothing with it.
        with self._box.within_reach(), suppress(UnreachableError):
            await self._lease.__aexit__(kind, error, trace)


class WatchedEpisode:
    """An episode in a box."""

    def __init__(self, box: EnvWorker, episode: ResumableEpisode) -> None:
        self._box = box
        self._episode = episode
        self._asking = episode if isinstance(episode, SplitStepEpisode) else None
        self._was_cut_off = False
        """Whether the step that was asked for last got no answer."""

    @property
    def turn(self) -> int:
        return self._episode.turn

    async def reset(self) -> Reset:
        return await self._box.call(self._episode.reset)

    async def step(self, action: str) -> Step:
        was_cut_off, self._was_cut_off = self._was_cut_off, False
        if was_cut_off and self._box.gone.is_set():  # it was under way when the box went, as we only know now
            raise self._box.loss_during_call()
        return await self._box.call(self._episode.step, action)

    async def repeat_step(self, action: str) -> Step:
        return await self._box.call(self._episode.repeat_step, action)

    def start_step(self, action: str) -> Future[Raw] | None:
        return None if self._asking is None else self._box.start_step(self._asking, action)

    def finish_step(self, answer: Future[Raw]) -> Step:
        assert self._asking is not None
        try:
            return self._asking.finish_step(answer)
        except UnreachableError:
            self._was_cut_off = True
            raise


async def stop(sandbox: EnvSandbox) -> None:
    """Stop a sandbox; one that cannot be stopped is logged, and is the business of who started it."""
    why = f"it did not stop within {_STOP_S:g} s"
    with anyio.move_on_after(_STOP_S, shield=True):
        try:
            await sandbox.stop()
            why = ""
        except (EnvkitError, OSError) as error:
            why = str(error)
    if why:
        _log.warning("sandbox %s may be left behind: %s", sandbox.id, why)
