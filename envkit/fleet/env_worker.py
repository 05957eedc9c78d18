"""A worker of a fleet: its states, its monitors, and its calls, which fail when the worker is lost."""

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
"""Seconds to wait for an unreachable sandbox to report the cause itself."""
_STOP_S = 15.0
"""Timeout in seconds for stopping a sandbox."""

_log = logging.getLogger(__name__)


class EnvSandbox(Protocol):
    """A sandbox with an env server, as a fleet uses it; see `envkit.protocols.Sandbox`."""

    @property
    def id(self) -> str: ...

    async def connect(self, name: str, /) -> socket: ...

    async def wait(self) -> Cause: ...

    async def stop(self) -> None: ...


class WorkerClient(Protocol):
    """Client of the env server in one worker."""

    def lease(self, task: Task, *, id: str | None = None) -> AbstractAsyncContextManager[ResumableEpisode]:
        """Lease an episode, or resume the one with this id and task. See `envkit.protocols.EnvHost.lease`."""
        ...

    async def health(self) -> object:
        """Return once the server's event loop has answered.

        Raises:
            UnreachableError: The server does not answer.
        """
        ...

    async def heartbeat(self) -> None:
        """Return once the server's process has answered, even if its event loop is busy.

        Raises:
            UnreachableError: The process does not answer.
        """
        ...


class LostDuringCallError(SandboxLostError):
    """The worker was lost during the call, which may be the reason. The fleet's callers get a `SandboxLostError`."""


class WorkerUnresponsiveError(LostDuringCallError):
    """The worker was lost because it became unresponsive."""


class WorkerEvent(StrEnum):
    """An event in the life of a worker."""

    ANSWERED = "answered"
    """Its server answered for the first time."""
    GONE = "gone"
    """The worker ended, or became unreachable."""
    SILENT = "silent"
    """The worker became unresponsive."""
    CLOSED = "closed"
    """The fleet closed it."""


_NEXT: Mapping[tuple[SandboxState, WorkerEvent], SandboxState] = {
    (SandboxState.STARTING, WorkerEvent.ANSWERED): SandboxState.READY,
    (SandboxState.STARTING, WorkerEvent.GONE): SandboxState.STOPPED,
    (SandboxState.STARTING, WorkerEvent.CLOSED): SandboxState.STOPPED,
    (SandboxState.READY, WorkerEvent.GONE): SandboxState.LOST,
    (SandboxState.READY, WorkerEvent.SILENT): SandboxState.LOST,
    (SandboxState.READY, WorkerEvent.CLOSED): SandboxState.STOPPED,
    # Two monitors may report the same loss; the second report changes nothing.
    (SandboxState.LOST, WorkerEvent.GONE): SandboxState.LOST,
    (SandboxState.LOST, WorkerEvent.SILENT): SandboxState.LOST,
    (SandboxState.LOST, WorkerEvent.CLOSED): SandboxState.LOST,
    (SandboxState.STOPPED, WorkerEvent.GONE): SandboxState.STOPPED,
    (SandboxState.STOPPED, WorkerEvent.SILENT): SandboxState.STOPPED,
    (SandboxState.STOPPED, WorkerEvent.CLOSED): SandboxState.STOPPED,
}


def after(state: SandboxState, event: WorkerEvent) -> SandboxState:
    """Return the state after `event`; only a ready worker can be lost.

    Raises:
        ValueError: The event is invalid in `state`.
    """
    try:
        return _NEXT[state, event]
    except KeyError:
        raise ValueError(f"invalid event {event} for a worker that is {state}") from None


class EnvWorker:
    """A worker of a fleet: one sandbox with an env server.

    Attributes:
        sandbox: Its sandbox.
        state: Its state.
        cause: Why it ended; its kind is ``unknown`` while the worker runs.
        gone: Set when it has ended.
        load: Number of slots in use.
        served: Number of slots ever assigned.
        answered_at: Loop time of the last answer of its server's event loop.
        process_seen_at: Loop time of the last heartbeat of its server's process.
    """

    def __init__(self, sandbox: EnvSandbox) -> None:
        self.sandbox = sandbox
        self.state = SandboxState.STARTING
        self.cause = Cause(CauseKind.UNKNOWN, "never connected")
        self.gone = anyio.Event()
        self.load = 0
        self.served = 0
        self.answered_at = self.process_seen_at = 0.0
        self._client: WorkerClient | None = None
        self._calls: set[anyio.CancelScope] = set()
        self._pending_steps: set[Future[Raw]] = set()
        self._was_unresponsive = False
        self._unreachable = anyio.Event()
        self._unreachable_cause = self.cause

    def open(self, client: WorkerClient) -> None:
        """Accept episodes from now on."""
        self.state = after(self.state, WorkerEvent.ANSWERED)
        self._client = client
        self.answered_at = self.process_seen_at = clock.now()

    def lease(self, task: Task, id: str) -> AbstractAsyncContextManager[ResumableEpisode]:
        if self._client is None:
            raise SandboxLostError(self.sandbox.id, self.cause)
        return self._client.lease(task, id=id)

    def end(self, event: WorkerEvent, cause: Cause) -> None:
        """Change the state and end all calls under way; only the first cause counts."""
        self.state = after(self.state, event)
        if not self.gone.is_set():
            self.cause = cause
            self._was_unresponsive = event is WorkerEvent.SILENT
            self.gone.set()
            for call in self._calls:
                call.cancel()
            for answer in self._pending_steps:
                if not answer.done():
                    answer.set_exception(self.loss_during_call())

    def start_step(self, episode: SplitStepEpisode, action: str) -> Future[Raw] | None:
        """Start a step; its future raises `LostDuringCallError` if the worker ends first.

        Returns:
            None if the step cannot be sent; `step` then reports the reason.
        """
        if self.gone.is_set():
            return None
        answer = episode.start_step(action)
        if answer is not None:
            self._pending_steps.add(answer)
            answer.add_done_callback(self._pending_steps.discard)
        return answer

    async def call(self, function: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """Make a call to the worker.

        Raises:
            LostDuringCallError: The worker is lost during the call; `WorkerUnresponsiveError` if it is unresponsive.
            SandboxLostError: It was lost before the call.
        """
        if self.gone.is_set():
            raise SandboxLostError(self.sandbox.id, self.cause)
        with self.within_reach():
            try:
                return await function(*args, **kwargs)
            except UnreachableError as error:
                self._unreachable_cause = Cause(CauseKind.UNRESPONSIVE, f"unreachable: {error}")
                self._unreachable.set()
                await self.gone.wait()  # the worker's monitors find the cause and cancel this call
        raise self.loss_during_call()

    def loss_during_call(self) -> LostDuringCallError:
        """Return the error for calls that were running when the worker ended."""
        kind = WorkerUnresponsiveError if self._was_unresponsive else LostDuringCallError
        return kind(self.sandbox.id, self.cause)

    @contextmanager
    def within_reach(self) -> Iterator[None]:
        """Cancel the block, without an error, when the worker ends."""
        with anyio.CancelScope() as scope:
            if self.gone.is_set():
                scope.cancel()
            self._calls.add(scope)
            try:
                yield
            finally:
                self._calls.discard(scope)

    async def watch_sandbox(self) -> None:
        """Wait until the sandbox reports its end."""
        self.end(WorkerEvent.GONE, await self.sandbox.wait())

    async def watch_calls(self) -> None:
        """Wait until a call fails, then give the sandbox `_CAUSE_S` seconds to report the cause itself."""
        await self._unreachable.wait()
        await anyio.sleep(_CAUSE_S)
        self.end(WorkerEvent.GONE, self._unreachable_cause)


class WorkerLease:
    """A lease on the worker's server; entering and leaving are cancelled when the worker ends."""

    def __init__(self, worker: EnvWorker, task: Task, id: str) -> None:
        self._worker = worker
        self._lease = worker.lease(task, id)

    async def __aenter__(self) -> WatchedEpisode:
        return WatchedEpisode(self._worker, await self._worker.call(self._lease.__aenter__))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The episode is over, so the loss of the worker no longer matters.
        with self._worker.within_reach(), suppress(UnreachableError):
            await self._lease.__aexit__(kind, error, trace)


class WatchedEpisode:
    """An episode in a worker."""

    def __init__(self, worker: EnvWorker, episode: ResumableEpisode) -> None:
        self._worker = worker
        self._episode = episode
        self._split_episode = episode if isinstance(episode, SplitStepEpisode) else None
        self._was_cut_off = False
        """Whether the connection broke during the last step."""

    @property
    def turn(self) -> int:
        return self._episode.turn

    async def reset(self) -> Reset:
        return await self._worker.call(self._episode.reset)

    async def step(self, action: str) -> Step:
        was_cut_off, self._was_cut_off = self._was_cut_off, False
        if was_cut_off and self._worker.gone.is_set():  # the step was under way when the worker was lost
            raise self._worker.loss_during_call()
        return await self._worker.call(self._episode.step, action)

    async def repeat_step(self, action: str) -> Step:
        return await self._worker.call(self._episode.repeat_step, action)

    def start_step(self, action: str) -> Future[Raw] | None:
        return None if self._split_episode is None else self._worker.start_step(self._split_episode, action)

    def finish_step(self, answer: Future[Raw]) -> Step:
        assert self._split_episode is not None
        try:
            return self._split_episode.finish_step(answer)
        except UnreachableError:
            self._was_cut_off = True
            raise


async def stop(sandbox: EnvSandbox) -> None:
    """Stop a sandbox. If that fails, log it and leave the cleanup to the backend."""
    why = f"it did not stop within {_STOP_S:g} s"
    with anyio.move_on_after(_STOP_S, shield=True):
        try:
            await sandbox.stop()
            why = ""
        except (EnvkitError, OSError) as error:
            why = str(error)
    if why:
        _log.warning("sandbox %s may be left behind: %s", sandbox.id, why)
