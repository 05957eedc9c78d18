"""The event loop: one thread that waits for files, times and signals, and outlives every mistake made in its callbacks.

An exception in PID 1 would end the box; here it ends the one call that it belongs to.
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
    import _signal as signal  # the package around it takes longer to load than this whole program

_READ = 1  # the same in poll and in epoll
_WRITE = 4
_OVER = 8 | 16


class FdWatch:
    """One file that is waited for. Closing a watch does not close the file.

    Args:
        owner: Whose callbacks these are; told of what they raise.
    """

    __slots__ = ("_born", "_loop", "_mask", "_on_read", "_on_write", "fd", "owner")

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
        self._born = loop.turn

    def want(self, *, read: bool | None = None, write: bool | None = None) -> None:
        """Say what to wait for from now on; None leaves it as it was."""
        mask = self._mask
        if read is not None:
            mask = mask | _READ if read else mask & ~_READ
        if write is not None:
            mask = mask | _WRITE if write else mask & ~_WRITE
        if mask == self._mask:
            return
        poller = self._loop.poller
        if not mask:
            poller.unregister(self.fd)  # an empty mask would still report, for ever, that the other end is closed
        elif self._mask:
            poller.modify(self.fd, mask)
        else:
            self._born = self._loop.turn
            poller.register(self.fd, mask)
        self._mask = mask

    def close(self) -> None:
        """Wait for it no more; safe to repeat. Must come before the file is closed."""
        self.want(read=False, write=False)
        if self._loop.watches.get(self.fd) is self:
            del self._loop.watches[self.fd]

    def happened(self, mask: int) -> None:
        """Hand out what was seen at this turn of the loop."""
        if self._born == self._loop.turn:
            return  # what was seen is about an earlier file of the same number
        if mask & (_READ | _OVER) and self._mask & _READ and self._on_read is not None:
            self._on_read()
        if mask & (_WRITE | _OVER) and self._mask & _WRITE and self._on_write is not None:
            self._on_write()


class Timer:
    """Something that is due later; `cancel` is safe to repeat."""

    __slots__ = ("_loop", "callback", "owner")

    def __init__(self, loop: Loop, callback: Callable[[], None] | None, owner: object) -> None:
        self._loop = loop
        self.callback = callback
        self.owner = owner

    def cancel(self) -> None:
        if self.callback is not None:
            self.callback = None
            self._loop.forget_timer()


class Loop:
    """Calls back.

    Args:
        on_crash: Told the owner of a callback that raised, and the exception.
        on_signal: Told the number of each signal that was caught.

    Attributes:
        turn: Counts the rounds.
    """

    def __init__(self, on_crash: Callable[[object, Exception], None], on_signal: Callable[[int], None]) -> None:
        self.turn = 0
        self.watches: dict[int, FdWatch] = {}
        self.poller = select.epoll() if hasattr(select, "epoll") else select.poll()
        self._unit = 1 if hasattr(select, "epoll") else 1000
        self._on_crash = on_crash
        self._on_signal = on_signal
        self._soon: list[tuple[Callable[[], None], object]] = []
        self._timers: list[tuple[float, int, Timer]] = []
        self._made = 0
        self._cancelled = 0
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
        """Return a watch on `fd` that waits for nothing yet."""
        watch = self.watches[fd] = FdWatch(self, fd, on_read, on_write, owner)
        return watch

    def soon(self, callback: Callable[[], None], owner: object = None) -> None:
        """Call before waiting again."""
        self._soon.append((callback, owner))

    def after(self, delay_s: float, callback: Callable[[], None], owner: object = None) -> Timer:
        """Call in `delay_s` seconds."""
        timer = Timer(self, callback, owner)
        self._made += 1
        heapq.heappush(self._timers, (time.monotonic() + delay_s, self._made, timer))
        return timer

    def forget_timer(self) -> None:
        """Take note that one was cancelled: those whose time is far away would pile up."""
        self._cancelled += 1
        if self._cancelled > 100 and self._cancelled * 2 > len(self._timers):
            self._timers = [entry for entry in self._timers if entry[2].callback is not None]
            heapq.heapify(self._timers)
            self._cancelled = 0

    def run(self) -> None:
        """Run for ever; what ends it is a callback that ends the process."""
        while True:
            while self._soon:
                soon, self._soon = self._soon, []
                for callback, owner in soon:
                    self._guard(callback, owner)
            events = self.poller.poll(self._wait_s() * self._unit)
            self.turn += 1
            for fd, mask in events:
                watch = self.watches.get(fd)
                if watch is not None:
                    self._guard(watch.happened, watch.owner, watch, mask)
            self._ring()

    def _wait_s(self) -> float:
        if self._soon:
            return 0
        while self._timers and self._timers[0][2].callback is None:
            heapq.heappop(self._timers)
            self._cancelled -= 1
        if not self._timers:
            return 3600
        return min(max(0.0, self._timers[0][0] - time.monotonic()), 3600)

    def _ring(self) -> None:
        if not self._timers:
            return
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            timer = heapq.heappop(self._timers)[2]
            callback, timer.callback = timer.callback, None
            if callback is None:
                self._cancelled -= 1
            else:
                self._guard(callback, timer.owner)

    def _guard(
        self, callback: Callable[..., None], owner: object, watch: FdWatch | None = None, *arguments: int
    ) -> None:
        try:
            callback(*arguments)
        except Exception as error:
            if watch is not None:
                watch.close()  # or it would raise again at once, for ever
            self._on_crash(owner, error)

    def _read_signals(self) -> None:
        try:
            numbers = os.read(self._signals, 4096)
        except BlockingIOError:
            return
        for number in set(numbers):
            self._on_signal(number)
