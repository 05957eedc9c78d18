"""Worlds that share boxes and worlds that have their own, behind one host."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from envkit.protocols import EnvHost, Episode
from envkit.types import Task


@dataclass(frozen=True, slots=True)
class Homes:
    """Plays each task where its world belongs; satisfies `envkit.protocols.EnvHost`.

    Attributes:
        shared: Where many episodes live together.
        own: Where each has a box of its own.
        shares: Says of an environment's id which of the two.
    """

    shared: EnvHost
    own: EnvHost
    shares: Callable[[str], bool]

    @property
    def capacity(self) -> int:
        return self.shared.capacity + self.own.capacity

    def lease(self, task: Task) -> AbstractAsyncContextManager[Episode]:
        return (self.shared if self.shares(task.env_id) else self.own).lease(task)
