"""The only clock of envkit: the event loop's time, real or virtual. Also starts and ends background tasks.

With ``run(main, virtual=True)``, waiting takes no real time: instead of sleeping, the loop sets its time to the next
deadline. For this reason all code waits on the loop's time, and a lint rule forbids other modules to read other clocks.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import selectors
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, ParamSpec, TypeVar

import anyio
import anyio.to_thread
from anyio._backends._asyncio import CancelScope
from anyio.abc import TaskGroup
from anyio.from_thread import start_blocking_portal

T = TypeVar("T")
P = ParamSpec("P")

MAX_TURNS_WITHOUT_TIME = 100_000
"""Iterations after which a `VirtualLoop` raises an error if its time has not changed."""

OWN_LATENESS_S = 0.25
"""Seconds by which a timer of this process may fire late before the delay counts as lag of its event loop."""


def now() -> float:
    """Return the running loop's time in seconds, real or virtual.

    Use it for deadlines. For short durations use `precise`, because uvloop's time has a resolution of only 1 ms.
    """
    # This is ten times as fast as anyio.current_time, which first detects which async library runs.
    return asyncio.get_running_loop().time()


def reader() -> Callable[[], float]:
    """Return a function like `now` that is faster, because it does not look up the running loop at each call."""
    return asyncio.get_running_loop().time


def precise() -> float:
    """Return a time in seconds with a resolution below 1 ms, for durations; virtual if the loop's time is virtual.

    Subtract only times of this function from each other: its zero is not the zero of `now`.
    """
    return precise_reader()()


def precise_reader() -> Callable[[], float]:
    """Return a function like `precise` that is faster, because it does not look up the running loop at each call."""
    loop = asyncio.get_running_loop()
    return loop.time if isinstance(loop, VirtualLoop) else time.perf_counter


def wall() -> float:
    """Return the time in seconds since 1970, for times that are stored and read by a later process."""
    return time.time()


stopwatch = time.perf_counter
"""Return the time of a monotonic clock in seconds, for durations in code without an event loop."""


def run(main: Callable[..., Awaitable[T]], *args: object, virtual: bool = False, fast: bool = False) -> T:
    """Run `main` in a new event loop.

    Args:
        main: Coroutine function.
        args: Its arguments.
        virtual: Use virtual time: instead of sleeping, the loop sets its time to the next deadline.
        fast: Use uvloop, which does not support virtual time.
    """
    if virtual and fast:
        raise ValueError("virtual and fast exclude each other (uvloop has no virtual time); pass only one")
    options: dict[str, Any] = {"loop_factory": VirtualLoop} if virtual else {"use_uvloop": fast}
    return anyio.run(partial(main, *args), backend="asyncio", backend_options=options)


def run_blocking(main: Callable[[], Awaitable[T]]) -> T:
    """Run `main` in a new event loop, in a worker thread if this thread already runs one.

    If the wait for the worker thread is interrupted, `main` is cancelled, and the interrupt is raised after its end.
    """
    if asyncio._get_running_loop() is None:  # get_running_loop would add its error to the tracebacks of `main`
        return run(main)
    with start_blocking_portal() as portal:
        result = portal.start_task_soon(main)
        try:
            return result.result()
        except BaseException:
            result.cancel()
            raise


async def to_thread(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a blocking call in a thread. Virtual time stands still until the call returns."""
    loop = asyncio.get_running_loop()
    virtual = isinstance(loop, VirtualLoop)
    if virtual:
        loop.holds += 1  # type: ignore[attr-defined]
    try:
        return await anyio.to_thread.run_sync(partial(call, *args, **kwargs))
    finally:
        if virtual:
            loop.holds -= 1  # type: ignore[attr-defined]


@asynccontextmanager
async def background_tasks() -> AsyncIterator[TaskGroup]:
    """Open a task group for the duration of the block, and cancel its tasks at the end of the block.

    If the block raises an error, it is raised unchanged; anyio's task group would wrap it in an exception group.
    """
    tasks = await anyio.create_task_group().__aenter__()
    try:
        yield tasks
    except BaseException as error:
        await end_tasks(tasks, error)
        raise
    await end_tasks(tasks)


async def end_tasks(tasks: TaskGroup, error: BaseException | None = None) -> None:
    """Cancel the tasks of a group that was entered without ``async with``, and exit the group.

    Args:
        tasks: The task group.
        error: The error that ended the caller's block, if any. Only a cancellation is passed to the group, because the
            group would wrap any other error in an exception group.
    """
    tasks.cancel_scope.cancel()
    if isinstance(error, asyncio.CancelledError):
        await tasks.__aexit__(type(error), error, error.__traceback__)
    else:
        await tasks.__aexit__(None, None, None)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time jumps to the next timer when nothing is ready.

    Timers with the same deadline run in the order in which they were set, and a cancellation reaches tasks in the same
    order in every process. The class uses private names of asyncio (`_ready`, `_scheduled`, `_run_once`,
    `_timer_handle_cancelled`) and of anyio (`CancelScope._host_task`): check them for each new version.

    Attributes:
        holds: Number of running waits in real time (for threads, sockets, processes), during which virtual time stops.
    """

    def __init__(self) -> None:
        self._virtual_now = 0.0
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._timers_set = 0
        self._timers_dead = 0
        self._turns_without_time = 0
        self.holds = 0
        super().__init__(selectors.DefaultSelector())
        self.set_task_factory(_numbered(itertools.count()))

    def time(self) -> float:
        return self._virtual_now

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self._timers_set += 1
        heapq.heappush(self._timers, (when, self._timers_set, handle))
        handle._scheduled = True  # type: ignore[attr-defined]
        return handle

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._virtual_now + delay, callback, *args, context=context)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        self._timers_dead += 1

    def _run_once(self) -> None:
        self._drop_dead_timers()
        self._wait_or_jump()
        while self._timers and self._timers[0][0] <= self._virtual_now:
            handle = heapq.heappop(self._timers)[2]
            handle._scheduled = False  # type: ignore[attr-defined]
            if handle.cancelled():
                self._timers_dead -= 1
            else:
                self._ready.append(handle)  # type: ignore[attr-defined]
        for _ in range(len(self._ready)):  # type: ignore[attr-defined]
            ready = self._ready.popleft()  # type: ignore[attr-defined]
            if not ready.cancelled():
                ready._run()

    def _drop_dead_timers(self) -> None:
        timers = self._timers
        if self._timers_dead > 100 and self._timers_dead * 2 > len(timers):
            timers[:] = [entry for entry in timers if not entry[2].cancelled()]
            heapq.heapify(timers)
            self._timers_dead = 0
        while timers and timers[0][2].cancelled():
            heapq.heappop(timers)
            self._timers_dead -= 1

    def _wait_or_jump(self) -> None:
        """Poll sockets and pipes. If nothing is ready and `holds` is 0, set the time to that of the next timer."""
        if self._ready:  # type: ignore[attr-defined]
            self._turns_without_time += 1
            if self._turns_without_time > MAX_TURNS_WITHOUT_TIME:
                raise RuntimeError(
                    f"virtual time stands still at {self._virtual_now} s after {MAX_TURNS_WITHOUT_TIME} iterations "
                    "of the event loop; a task loops without waiting"
                )
            if self._turns_without_time % 64 == 0:
                self._poll(0)
            return
        if self.holds:
            self._poll(0.05 if self._timers else None)
        elif self._poll(0):
            pass
        elif self._timers:
            self._virtual_now = max(self._virtual_now, self._timers[0][0])
            self._turns_without_time = 0
        elif not self._stopping:  # type: ignore[attr-defined]
            waiting = ", ".join(sorted(task.get_name() for task in asyncio.all_tasks(self))) or "no task"
            raise RuntimeError(f"deadlock: no task can run and no timer is set; these tasks wait for ever: {waiting}")

    def _poll(self, timeout: float | None) -> bool:
        events = self._selector.select(timeout)  # type: ignore[attr-defined]
        self._process_events(events)  # type: ignore[attr-defined]
        return bool(events)


class _NumberedTask(asyncio.Task[Any]):
    """A task whose hash is its number, so that a set of tasks has the same order in every process."""

    def __init__(self, number: int, *args: Any, **options: Any) -> None:
        self._number = number
        super().__init__(*args, **options)

    def __hash__(self) -> int:
        return self._number


def _hash_of_scope(scope: CancelScope) -> int:
    return hash(scope._host_task)


# anyio cancels the tasks and scopes inside a scope in the order of two sets. By default, their hashes are addresses in
# memory. A scope is in such a set only while its task runs in it. In loops in real time, this changes only the order.
CancelScope.__hash__ = _hash_of_scope  # type: ignore[method-assign, assignment]


def _numbered(numbers: Iterator[int]) -> Callable[..., asyncio.Task[Any]]:
    """Return a task factory for an event loop."""
    return lambda loop, coroutine, **options: _NumberedTask(next(numbers), coroutine, loop=loop, **options)


def compensate_loop_lag(answered_at: float, late_s: float, *, now: float) -> float:
    """Return `answered_at` moved forward by `late_s`, in which this process could not read the peer's answers.

    Args:
        answered_at: Time of a peer's last answer, or the result of an earlier call of this function.
        late_s: Seconds by which a timer of this process fired late. A delay up to `OWN_LATENESS_S` is ignored.
        now: The current time, on the same clock as `answered_at`.
    """
    return min(answered_at + late_s, now) if late_s > OWN_LATENESS_S else answered_at
