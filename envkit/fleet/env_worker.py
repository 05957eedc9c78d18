"""Workers of a fleet: sandboxes of a pool, in each of which an env server plays episodes."""

from __future__ import annotations

from asyncio import Future
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from typing import NamedTuple, ParamSpec, Protocol, TypeAlias, TypeVar

import anyio
from msgspec import Raw

from envkit import clock
from envkit.errors import EnvkitError, SandboxLostError, UnreachableError
from envkit.protocols import Episode, Sandbox, ServerPool
from envkit.types import Cause, CauseKind, SandboxSpec, Task

T = TypeVar("T")
P = ParamSpec("P")

_CAUSE_S = 1.0
"""When a call cannot reach a worker: seconds to wait for the worker's sandbox to report why it ended."""
_PATIENCE = 0.05
"""Fraction of the time after which a silent server is lost, for which its event loop may be silent."""
_RETRY_S = 0.02
"""Seconds between two attempts to connect to a server that does not listen yet."""


class WorkerClient(Protocol):
    """Client of the env server in one worker."""

    async def health(self) -> object:
        """Return once the server's event loop has answered; raise `UnreachableError` if it cannot."""
        ...

    async def heartbeat(self) -> None:
        """Like `health`, but a thread of the server answers, also while a step of an environment blocks the loop."""
        ...

    def lease(self, task: Task, *, id: str | None = None) -> AbstractAsyncContextManager[Episode]:
        """Lease an episode of `task`; if the server has one with this id and task, resume it."""
        ...


ConnectSandbox: TypeAlias = Callable[[Sandbox], AbstractAsyncContextManager[WorkerClient]]


class WorkerStart(NamedTuple):
    """How to start a worker. `connect` raises `UnreachableError` if the env server does not listen yet."""

    spec: SandboxSpec
    connect: ConnectSandbox


@asynccontextmanager
async def connect_when_serving(connect: ConnectSandbox, sandbox: Sandbox) -> AsyncIterator[WorkerClient]:
    """Open a client of the env server in `sandbox` as soon as the server answers, for the duration of the block.

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
    """The worker was lost. The fleet converts this error to a `SandboxLostError` for its callers."""

    def __init__(self, worker: EnvWorker) -> None:
        super().__init__(worker.sandbox.id, worker.cause)
        self.worker = worker


class LostDuringCallError(WorkerLostError):
    """The worker was lost during the call, which may have caused the loss."""


class EnvWorker:
    """A worker of a fleet: one sandbox with an env server that answers.

    Args:
        pool: Monitors the sandbox, leased from it, together with the server.
        longest_step_s: Seconds after which the worker is lost if the event loop of its server does not answer.
        is_extra: Whether the worker was started because an episode must play alone.

    Attributes:
        is_computing: Whether the event loop of the server does not answer, so that other workers get new episodes.
        cause: Why the worker ended; a cause of kind ``unknown`` while the worker runs.
        gone: Set when the worker has ended.
        cut_off: Episodes whose last step got no answer because the connection broke, and has not been repeated yet.
        calls_at_end: Number of calls in progress when the worker ended. Each of them may have caused the end.
        attributed: Set when the loss of the worker is attributed to one episode. The loss then counts neither against
            other episodes nor against the restart budget.
    """

    def __init__(
        self,
        pool: ServerPool,
        sandbox: Sandbox,
        client: WorkerClient,
        slots: int,
        longest_step_s: float,
        is_extra: bool,
    ) -> None:
        self.sandbox = sandbox
        self.client = client
        self.slots = slots
        self.is_extra = is_extra
        self.cause = Cause(CauseKind.UNKNOWN, "runs")
        self.gone = anyio.Event()
        self.load = 0
        self.cut_off: set[object] = set()
        self.calls_at_end = 0
        self.attributed = anyio.Event()
        self.is_computing = False
        self._pool = pool
        self._longest_step_s = longest_step_s
        self._answered_at = clock.now()
        self._calls: set[anyio.CancelScope] = set()
        self._pending_steps: set[Future[Raw]] = set()
        pool.watch(sandbox.id, self._answer, self.end)

    @property
    def is_lost(self) -> bool:
        """Whether the worker ended unexpectedly."""
        return self.gone.is_set() and self.cause.kind is not CauseKind.STOPPED

    async def _answer(self, lost_s: float) -> None:
        """Return once the server has answered. A thread of it does so also while a step computes in its event loop."""
        limit_s = max(self._longest_step_s, lost_s)
        rest_s = self._answered_at + limit_s - clock.now()
        is_last = rest_s < lost_s / 2
        with anyio.move_on_after(rest_s if is_last else lost_s * _PATIENCE):
            await self.client.health()
            self._answered_at, self.is_computing = clock.now(), False
            return
        if is_last:
            why = f"env server computed for {limit_s:g} s, the limit for one step"
            raise SandboxLostError(self.sandbox.id, Cause(CauseKind.UNRESPONSIVE, why))
        self.is_computing = True
        await self.client.heartbeat()

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
                self._pool.lose(self.sandbox.id, Cause(CauseKind.UNKNOWN, f"unreachable: {error}"))
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
