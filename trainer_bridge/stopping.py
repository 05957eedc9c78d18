"""A request to stop a run early, and what the run has to finish first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import anyio


class Stop:
    """Cancels a part of a run when that is requested, and says what the run waits for until it has ended.

    Args:
        say: Shows a line.

    Attributes:
        is_requested: Whether the run is to stop.
    """

    def __init__(self, say: Callable[[str], None] = lambda line: None) -> None:
        self.is_requested = False
        self._say = say
        self._said = ""
        self._busy = "the work under way to be cut, and for the sandboxes to end"
        self._scope: anyio.CancelScope | None = None

    def request(self, advice: str = "") -> None:
        """Cancel what runs in `cancels`, now or later; say what has to be finished first, and then `advice`."""
        if not self.is_requested:
            self.is_requested = True
            self._announce(advice)
            if self._scope is not None:
                self._scope.cancel()

    @contextmanager
    def cancels(self) -> Iterator[None]:
        """End the block when a stop is requested."""
        with anyio.CancelScope() as self._scope:
            if self.is_requested:
                self._scope.cancel()
            yield

    @contextmanager
    def waits_for(self, what: str) -> Iterator[None]:
        """Name what a stop has to wait for while the block runs."""
        outer, self._busy = self._busy, what
        if self.is_requested:
            self._announce()
        try:
            yield
        finally:
            self._busy = outer

    def _announce(self, advice: str = "") -> None:
        if self._said != self._busy:
            self._said = self._busy
            self._say(f"stopping: waiting for {self._busy}{advice}")
