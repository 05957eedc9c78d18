"""A worker of a fleet: its states, its monitors, and its calls, which fail when the worker is lost."""

from __future__ import annotations

import logging
from asyncio import Future
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
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


class WorkerLostError(SandboxLostError):
    """The worker was lost. Callers of the fleet get a plain `SandboxLostError`.

    Attributes:
        worker: The lost worker.
    """

    def __init__(self, worker: EnvWorker) -> None:
        super().__init__(worker.sandbox.id, worker.cause)
        self.worker = worker


class LostDuringCallError(WorkerLostError):
    """The worker was lost during the call, which may be the reason."""


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
        was_unresponsive: Whether it ended because it became unresponsive.
        calls_at_end: Number of calls under way when it ended, each of which may be the reason.
        attributed: Set when its loss is attributed to one episode. It then counts against no other episode, and not
            against the restart budget.
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
        self.cut_off: set[WatchedEpisode] = set()
        """Episodes whose last step was cut off by a broken connection and is not repeated yet."""
        self.was_unresponsive = False
        self.calls_at_end = 0
        self.attributed = anyio.Event()
        self._unreachable = anyio.Event()
        self._unreachable_cause = self.cause

    def open(self, client: WorkerClient) -> None:
        """Start to accept episodes; `client` is connected to the worker's server."""
        self.state = SandboxState.READY
        self._client = client
        self.answered_at = self.process_seen_at = clock.now()

    def lease(self, task: Task, id: str) -> AbstractAsyncContextManager[ResumableEpisode]:
        if self._client is None:
            raise WorkerLostError(self)
        return self._client.lease(task, id=id)

    def end(self, cause: Cause, *, is_closed: bool = False, is_unresponsive: bool = False) -> None:
        """Record the end of the worker and end all calls under way; later ends have no effect.

        Args:
            cause: Why the worker ended.
            is_closed: Whether the fleet ended it. Otherwise, a worker that was ready is lost.
            is_unresponsive: Whether it ended because it became unresponsive.
        """
        if not self.gone.is_set():
            is_lost = self.state is SandboxState.READY and not is_closed
            self.state = SandboxState.LOST if is_lost else SandboxState.STOPPED
            self.cause = cause
            self.was_unresponsive = is_unresponsive
            self.calls_at_end = len(self._calls) + len(self.cut_off)
            self.calls_at_end += sum(not answer.done() for answer in self._pending_steps)
            self.gone.set()
            for call in self._calls:
                call.cancel()
            for answer in self._pending_steps:
                if not answer.done():
                    answer.set_exception(LostDuringCallError(self))

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
            LostDuringCallError: The worker is lost during the call.
            WorkerLostError: It was lost before the call.
        """
        if self.gone.is_set():
            raise WorkerLostError(self)
        with self.within_reach():
            try:
                return await function(*args, **kwargs)
            except (UnreachableError, SandboxLostError) as error:
                # A reconnect may find that the sandbox is lost. An environment may also report the loss of another one.
                if isinstance(error, SandboxLostError) and error.sandbox_id != self.sandbox.id:
                    raise
                self._unreachable_cause = Cause(CauseKind.UNRESPONSIVE, f"unreachable: {error}")
                self._unreachable.set()
                await self.gone.wait()  # the worker's monitors find the cause and cancel this call
        raise LostDuringCallError(self)

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
        """Wait until the sandbox reports its end, and then end the worker with that cause."""
        self.end(await self.sandbox.wait())

    async def watch_calls(self) -> None:
        """Wait until a call cannot reach the worker, and end the worker `_CAUSE_S` seconds later. In that time, the
        sandbox may report the cause itself.
        """
        await self._unreachable.wait()
        await anyio.sleep(_CAUSE_S)
        self.end(self._unreachable_cause)


class WorkerLease:
    """A lease on the worker's server; entering and leaving are cancelled when the worker ends."""

    def __init__(self, worker: EnvWorker, task: Task, id: str) -> None:
        self._worker = worker
        self._lease = worker.lease(task, id)

    async def __aenter__(self) -> WatchedEpisode:
        self._watched = WatchedEpisode(self._worker, await self._worker.call(self._lease.__aenter__))
        return self._watched

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._worker.cut_off.discard(self._watched)
        # The episode is over, so the loss of the worker no longer matters.
        with self._worker.within_reach(), suppress(UnreachableError):
            await self._lease.__aexit__(kind, error, trace)


class WatchedEpisode:
    """An episode in a worker."""

    def __init__(self, worker: EnvWorker, episode: ResumableEpisode) -> None:
        self._worker = worker
        self._episode = episode
        self._split_episode = episode if isinstance(episode, SplitStepEpisode) else None

    @property
    def turn(self) -> int:
        return self._episode.turn

    async def reset(self) -> Reset:
        return await self._worker.call(self._episode.reset)

    async def step(self, action: str) -> Step:
        if self in self._worker.cut_off:
            self._worker.cut_off.discard(self)
            if self._worker.gone.is_set():  # the step was under way when the worker was lost
                raise LostDuringCallError(self._worker)
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
            self._worker.cut_off.add(self)
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
