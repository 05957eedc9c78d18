"""The event loop: one thread that waits for file descriptors, timers and signals, and calls callbacks.

An uncaught exception in process 1 would end the sandbox. The loop therefore catches the exceptions of callbacks, so
that only the callback's owner (such as one call of the host) fails.
"""

from __future__ import annotations

import heapq
import os
import select
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from collections.abc import Callable
else:
    import _signal as signal  # The module `signal` takes longer to load than the whole agent.

# Values of epoll's events.
_READ = 1
_WRITE = 4
_CLOSED = 8 | 16


class FdWatch:
    """Calls back when a file descriptor can be read or written. Closing the watch does not close the descriptor.

    If a callback raises, the loop passes `owner` to `on_crash`.
    """

    __slots__ = ("_loop", "_mask", "_on_read", "_on_write", "_registered_turn", "fd", "owner")

    def __init__(
        self,
        loop: Loop,
        fd: int,
        on_read: Callable[[], object] | None,
        on_write: Callable[[], object] | None,
        owner: object,
    ) -> None:
        self.fd = fd
        self.owner = owner
        self._loop = loop
        self._on_read = on_read
        self._on_write = on_write
        self._mask = 0
        self._registered_turn = loop.turn

    def want(self, *, read: bool | None = None, write: bool | None = None) -> None:
        """Set whether to call back when the descriptor can be read or written; None leaves a setting unchanged."""
        mask = self._mask
        if read is not None:
            mask = mask | _READ if read else mask & ~_READ
        if write is not None:
            mask = mask | _WRITE if write else mask & ~_WRITE
        if mask == self._mask:
            return
        poller = self._loop.poller
        if not mask:
            # Even with an empty mask, each poll would report that the other end is closed.
            poller.unregister(self.fd)
        elif self._mask:
            poller.modify(self.fd, mask)
        else:
            self._registered_turn = self._loop.turn
            poller.register(self.fd, mask)
        self._mask = mask

    def close(self) -> None:
        """Stop watching; a repeated call does nothing. Must be called before the descriptor is closed."""
        self.want(read=False, write=False)
        if self._loop.watches.get(self.fd) is self:
            del self._loop.watches[self.fd]

    def dispatch(self, mask: int) -> None:
        """Run the callbacks for the poll events in `mask`."""
        if self._registered_turn == self._loop.turn:
            # This watch is newer than the poll. The events belong to a closed file that had the same descriptor.
            return
        if mask & (_READ | _CLOSED) and self._mask & _READ and self._on_read is not None:
            self._on_read()
        if mask & (_WRITE | _CLOSED) and self._mask & _WRITE and self._on_write is not None:
            self._on_write()


class Timer:
    """A callback that the loop calls once, at a later time, unless `cancel` was called before."""

    __slots__ = ("_loop", "callback", "owner")

    def __init__(self, loop: Loop, callback: Callable[[], None], owner: object) -> None:
        self._loop = loop
        self.callback = callback
        self.owner = owner

    def cancel(self) -> None:
        self._loop.timers = [entry for entry in self._loop.timers if entry[2] is not self]
        heapq.heapify(self._loop.timers)


class Loop:
    """The event loop.

    Attributes:
        turn: Number of polls so far.
    """

    def __init__(self, on_crash: Callable[[object, Exception], None], on_signal: Callable[[int], None]) -> None:
        self.turn = 0
        self.watches: dict[int, FdWatch] = {}
        self.poller = select.epoll()
        self._on_crash = on_crash
        self._on_signal = on_signal
        self._soon: list[tuple[Callable[[], None], object]] = []
        self.timers: list[tuple[float, int, Timer]] = []
        self._made = 0
        self._signals, waker = os.pipe()
        os.set_blocking(self._signals, False)
        os.set_blocking(waker, False)
        signal.set_wakeup_fd(waker)
        self.watch(self._signals, on_read=self._read_signals).want(read=True)

    def watch(
        self,
        fd: int,
        *,
        on_read: Callable[[], object] | None = None,
        on_write: Callable[[], object] | None = None,
        owner: object = None,
    ) -> FdWatch:
        """Return a watch on `fd`, which calls neither callback before `FdWatch.want` is called."""
        watch = self.watches[fd] = FdWatch(self, fd, on_read, on_write, owner)
        return watch

    def soon(self, callback: Callable[[], None], owner: object = None) -> None:
        """Call `callback` before the next poll."""
        self._soon.append((callback, owner))

    def after(self, delay_s: float, callback: Callable[[], None], owner: object = None) -> Timer:
        """Call `callback` after `delay_s` seconds."""
        timer = Timer(self, callback, owner)
        self._made += 1
        heapq.heappush(self.timers, (time.monotonic() + delay_s, self._made, timer))
        return timer

    def run(self) -> None:
        """Run the loop. Never returns; a callback may exit the process."""
        while True:
            while self._soon:
                soon, self._soon = self._soon, []
                for callback, owner in soon:
                    self._guard(callback, owner)
            events = self.poller.poll(self._wait_s())
            self.turn += 1
            for fd, mask in events:
                watch = self.watches.get(fd)
                if watch is not None:
                    self._guard(watch.dispatch, watch.owner, watch, mask)
            self._run_timers()

    def _wait_s(self) -> float:
        if self._soon:
            return 0
        if not self.timers:
            return 3600
        return min(max(0.0, self.timers[0][0] - time.monotonic()), 3600)

    def _run_timers(self) -> None:
        now = time.monotonic()
        while self.timers and self.timers[0][0] <= now:
            timer = heapq.heappop(self.timers)[2]
            self._guard(timer.callback, timer.owner)

    def _guard(
        self, callback: Callable[..., None], owner: object, watch: FdWatch | None = None, *arguments: int
    ) -> None:
        try:
            callback(*arguments)
        except Exception as error:
            if watch is not None:
                watch.close()  # If the watch stayed open, its callback would raise again after every poll.
            self._on_crash(owner, error)

    def _read_signals(self) -> None:
        try:
            numbers = os.read(self._signals, 4096)
        except BlockingIOError:
            return
        for number in set(numbers):
            self._on_signal(number)
