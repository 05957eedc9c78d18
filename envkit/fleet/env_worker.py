"""Workers of a fleet: sandboxes of a pool, in each of which an env server plays episodes."""

from __future__ import annotations

from asyncio import Future
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from typing import NamedTuple, ParamSpec, TypeAlias, TypeVar

import anyio
from msgspec import Raw

from envkit.errors import EnvkitError, SandboxLostError, UnreachableError
from envkit.fleet.worker_health import HeartbeatTimes, ServerMonitor, WorkerClient
from envkit.protocols import Episode, Sandbox
from envkit.types import Cause, CauseKind, Task

T = TypeVar("T")
P = ParamSpec("P")

_CAUSE_S = 1.0
"""When a call cannot reach a worker: seconds to wait for the worker's sandbox to report why it ended."""
_RETRY_S = 0.02
"""Seconds between two attempts to connect to a server that does not listen yet."""


ConnectSandbox: TypeAlias = Callable[[Sandbox], AbstractAsyncContextManager[WorkerClient]]


@asynccontextmanager
async def connect_when_serving(connect: ConnectSandbox, sandbox: Sandbox) -> AsyncIterator[WorkerClient]:
    """Open a client of the env server in `sandbox` as soon as the server answers, for the duration of the block.

    Args:
        connect: Opens a client; raises `UnreachableError` if the server does not listen yet.
        sandbox: The sandbox in which the server runs.

    Raises:
        EnvkitError: The server cannot be used, for example because it has another protocol version.
    """
    async with AsyncExitStack() as opened:
        while True:
            try:
                async with AsyncExitStack() as stack:
                    client = await stack.enter_async_context(connect(sandbox))
                    await client.health()
                    opened.push_async_exit(stack.pop_all())
                    break
            except EnvkitError as error:
                if not error.retry:
                    raise
            await anyio.sleep(_RETRY_S)
        yield client


class WorkerLostError(SandboxLostError):
    """The worker was lost. The fleet converts this error to a `SandboxLostError` for its callers.

    Attributes:
        worker: The lost worker.
    """

    def __init__(self, worker: EnvWorker) -> None:
        super().__init__(worker.sandbox.id, worker.cause)
        self.worker = worker


class LostDuringCallError(WorkerLostError):
    """The worker was lost during the call, which may have caused the loss."""


class EnvWorker:
    """A worker of a fleet: one sandbox with an env server.

    Attributes:
        sandbox: Sandbox of the worker, leased from the pool.
        cause: Why the worker ended; a cause of kind ``unknown`` while the worker runs.
        gone: Set when the worker has ended.
        load: Number of episodes that have a slot at present.
        served: Number of episodes that have ever had a slot.
        monitor: Monitor of the env server; None until the server has answered.
        cut_off: Episodes whose last step got no answer because the connection broke, and has not been repeated yet.
        calls_at_end: Number of calls in progress when the worker ended. Each of them may have caused the end.
        attributed: Set when the loss of the worker is attributed to one episode. The loss then counts neither against
            other episodes nor against the restart budget.
    """

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        self.cause = Cause(CauseKind.UNKNOWN, "never connected")
        self.gone = anyio.Event()
        self.load = 0
        self.served = 0
        self.monitor: ServerMonitor | None = None
        self.cut_off: set[object] = set()
        self.calls_at_end = 0
        self.attributed = anyio.Event()
        self._client: WorkerClient | None = None
        self._calls: set[anyio.CancelScope] = set()
        self._pending_steps: set[Future[Raw]] = set()

    @property
    def is_lost(self) -> bool:
        """Whether the worker ended unexpectedly after its server had answered."""
        return self.gone.is_set() and self.monitor is not None and self.cause.kind is not CauseKind.STOPPED

    @property
    def was_unresponsive(self) -> bool:
        """Whether the worker ended because it did not answer in time."""
        return self.cause.kind is CauseKind.UNRESPONSIVE

    def open(self, client: WorkerClient, heartbeat: HeartbeatTimes) -> ServerMonitor:
        """Make the worker accept episodes, through `client`; return a monitor of the server behind `client`."""
        self._client = client
        self.monitor = ServerMonitor(client, heartbeat)
        return self.monitor

    def slot(self, task: Task, id: str) -> WorkerSlot:
        """Return a slot for an episode of `task`. If the server has an episode with this id and task, resume it."""
        assert self._client is not None
        return WorkerSlot(self, self._client.lease(task, id=id))

    def end(self, cause: Cause) -> None:
        """Record that the worker has ended, and end all calls in progress. Calling `end` again has no effect."""
        if not self.gone.is_set():
            self.cause = cause
            self.calls_at_end = len(self._calls) + len(self.cut_off)
            self.calls_at_end += sum(not answer.done() for answer in self._pending_steps)
            self.gone.set()
            for call in self._calls:
                call.cancel()
            for answer in self._pending_steps:
                if not answer.done():
                    answer.set_exception(LostDuringCallError(self))

    def start_step(self, episode: Episode, action: str) -> Future[Raw] | None:
        """Start a step and return the future of its answer. The future raises `LostDuringCallError` if the worker ends.

        If the step cannot be sent, return None. The caller then calls `episode.step`, which raises the reason.
        """
        if self.gone.is_set():
            return None
        answer = episode.start_step(action)
        if answer is not None:
            self._pending_steps.add(answer)
            answer.add_done_callback(self._pending_steps.discard)
        return answer

    async def call(self, function: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `function`, which sends a request to the worker, and return its result.

        Raises:
            LostDuringCallError: The worker was lost during the call.
            WorkerLostError: The worker was lost before the call.
        """
        if self.gone.is_set():
            raise WorkerLostError(self)
        with self.within_reach():
            try:
                return await function(*args, **kwargs)
            except (UnreachableError, SandboxLostError) as error:
                # A SandboxLostError about a sandbox that the environment uses does not mean that this worker is lost.
                if isinstance(error, SandboxLostError) and error.sandbox_id != self.sandbox.id:
                    raise
                await anyio.sleep(_CAUSE_S)  # meanwhile, the sandbox may report why it ended
                assert self.monitor is not None
                self.monitor.report_lost(Cause(CauseKind.UNKNOWN, f"unreachable: {error}"))
                await self.gone.wait()  # until the worker ends, which cancels this block
        raise LostDuringCallError(self)

    @contextmanager
    def within_reach(self) -> Iterator[None]:
        """Cancel the ``with`` block, without an error, as soon as the worker ends."""
        with anyio.CancelScope() as scope:
            if self.gone.is_set():
                scope.cancel()
            self._calls.add(scope)
            try:
                yield
            finally:
                self._calls.discard(scope)


class WorkerSlot(NamedTuple):
    """A slot in a worker for one episode.

    Attributes:
        worker: The worker.
        lease: Lease of the episode on the worker's server. Entering it may already reset the environment.
    """

    worker: EnvWorker
    lease: AbstractAsyncContextManager[Episode]
