"""Worlds that share boxes and worlds that have their own, behind one host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from envkit.protocols import Episode, LastingHost, WatchedHost
from envkit.types import Task


@dataclass(frozen=True, slots=True)
class Homes:
    """Plays each task where its world belongs; satisfies `envkit.protocols.LastingHost`.

    Attributes:
        shared: Where many episodes live together.
        own: Where each has a box of its own.
        shares: Says of an environment's id which of the two.
    """

    shared: LastingHost
    own: LastingHost
    shares: Callable[[str], bool]

    @property
    def capacity(self) -> int:
        return self.shared.capacity + self.own.capacity

    @property
    def why_unready(self) -> str:
        """See `envkit.protocols.WatchedHost`; sandboxes of one episode each come and go, and do not count."""
        return self.shared.why_unready if isinstance(self.shared, WatchedHost) else ""

    def lease(self, task: Task) -> AbstractAsyncContextManager[Episode]:
        return self._home(task).lease(task)

    def lease_as(self, key: str, task: Task) -> AbstractAsyncContextManager[Episode]:
        return self._home(task).lease_as(key, task)

    def recall(self, key: str) -> Task | None:
        return self.shared.recall(key) or self.own.recall(key)

    def recallable(self) -> Sequence[str]:
        return [*self.shared.recallable(), *self.own.recallable()]

    def _home(self, task: Task) -> LastingHost:
        return self.shared if self.shares(task.env_id) else self.own
