"""Stocks: sandboxes that are kept ready for who asks for exactly such a one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass

from envkit.protocols import Sandbox
from envkit.restarts import Failures, RestartBudget
from envkit.types import SandboxSpec, SandboxState

from .instance import Instance
from .node import Node


@dataclass(frozen=True, slots=True)
class WarmSpec:
    """What is to be kept ready.

    Attributes:
        spec: What each one is; without ``ttl_s``, which would have begun long before somebody has it.
        spares: How many.
        boot: Returns once one that was started may be lent, such as when the server in it answers; None for at once.
            What it raises of `envkit.errors` counts as a failed start, as does more time than a start may take.

    Raises:
        ValueError: The spec has a time to live.
    """

    spec: SandboxSpec
    spares: int
    boot: Callable[[Sandbox], Awaitable[None]] | None = None

    def __post_init__(self) -> None:
        if self.spec.ttl_s is not None:
            raise ValueError(f"ttl_s={self.spec.ttl_s:g} is refused: it would begin long before somebody has the spare")

    @property
    def name(self) -> str:
        """What people call it."""
        return self.spec.image or " ".join(self.spec.command)[:60] or "bare sandboxes"


class WarmStock:
    """The spares of one stock.

    Attributes:
        stock: What belongs there.
        spares: What is there, or will be, the first that came first.
        resumes_at: Before when none is started, on the clock of the loop.
    """

    def __init__(self, stock: WarmSpec) -> None:
        self.stock = stock
        self.spares: dict[Instance, None] = {}
        self.resumes_at = 0.0
        self._failures = Failures()

    @property
    def missing(self) -> int:
        """Number of spares that are not even being started."""
        return max(self.stock.spares - len(self.spares), 0)

    def ready(self, nodes: Collection[Node]) -> Instance | None:
        """Return the spare that is to be lent next, one on these nodes; None when none is ready."""
        ready = (spare for spare in self.spares if spare.state is SandboxState.READY)
        return next((spare for spare in ready if spare.node in nodes), None)

    def is_one_coming(self) -> bool:
        return any(spare.state is SandboxState.STARTING for spare in self.spares)

    def fail(self, budget: RestartBudget, *, now: float) -> bool:
        """A spare did not start, or died: wait before the next one.

        Returns:
            Whether the budget allows one; if not, the next one comes when the window of the oldest failure has passed,
            and never if it allows none at all.
        """
        replacement = self._failures.add(budget, now=now)
        self.resumes_at = max(self.resumes_at, replacement.at)
        return not replacement.is_late
