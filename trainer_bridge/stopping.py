"""Stopping a run on request, after it has finished the work that must not be interrupted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import anyio


class Stop:
    """Cancels the block of `cancels` on request, and shows the user what work must finish before the run ends.

    Args:
        announce: Shows a line to the user.

    Attributes:
        is_requested: Whether a stop was requested.
    """

    def __init__(self, announce: Callable[[str], None] = lambda line: None) -> None:
        self.is_requested = False
        self._announce = announce
        self._announced = ""
        self._busy = "the current work to be cancelled, and for the sandboxes to stop"
        self._scope: anyio.CancelScope | None = None

    def request(self, advice: str = "") -> None:
        """Cancel the block of `cancels`, now or when it starts. Announce what the stop waits for, followed by `advice`.

        Repeated calls have no effect.
        """
        if not self.is_requested:
            self.is_requested = True
            self._announce_wait(advice)
            if self._scope is not None:
                self._scope.cancel()

    @contextmanager
    def cancels(self) -> Iterator[None]:
        """Run a ``with`` block that is cancelled when a stop is requested."""
        with anyio.CancelScope() as self._scope:
            if self.is_requested:
                self._scope.cancel()
            yield

    @contextmanager
    def waits_for(self, what: str) -> Iterator[None]:
        """If a stop is requested before or during a ``with`` block, announce that the stop waits for `what`."""
        outer, self._busy = self._busy, what
        if self.is_requested:
            self._announce_wait()
        try:
            yield
        finally:
            self._busy = outer

    def _announce_wait(self, advice: str = "") -> None:
        if self._announced != self._busy:
            self._announced = self._busy
            self._announce(f"stopping: waiting for {self._busy}{advice}")
