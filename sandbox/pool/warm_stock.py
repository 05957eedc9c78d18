"""Warm stock: sandboxes that are started in advance, for requests with exactly the same spec."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass

from envkit.protocols import Sandbox
from envkit.types import SandboxSpec, SandboxState

from .instance import Instance
from .node import Node


@dataclass(frozen=True, slots=True)
class WarmSpec:
    """Configuration of one warm stock.

    Attributes:
        spec: Spec of the sandboxes. It must not set ``ttl_s``, because the time to live would begin before the lease.
        count: Number of warm sandboxes to keep ready.
        boot: Called with each started sandbox; returns when the sandbox may be leased, e.g. when its server answers.
            The start fails if `boot` raises or takes longer than the spec's start timeout. None means no wait.

    Raises:
        ValueError: The spec sets ``ttl_s``.
    """

    spec: SandboxSpec
    count: int
    boot: Callable[[Sandbox], Awaitable[None]] | None = None

    def __post_init__(self) -> None:
        if self.spec.ttl_s is not None:
            raise ValueError(f"ttl_s={self.spec.ttl_s:g} is refused: it would begin before the lease; do not set ttl_s")

    @property
    def name(self) -> str:
        """Name of the stock in messages: its image or its command."""
        return self.spec.image or " ".join(self.spec.command)[:60] or "bare sandboxes"


class WarmStock:
    """The warm sandboxes of one spec.

    Attributes:
        warm_spec: Configuration of the stock.
        instances: Sandboxes that are ready or starting, oldest first.
        resumes_at: Event-loop time before which the stock starts no sandbox, because of the restart budget.
    """

    def __init__(self, warm_spec: WarmSpec) -> None:
        self.warm_spec = warm_spec
        self.instances: dict[Instance, None] = {}
        self.resumes_at = 0.0

    @property
    def missing(self) -> int:
        """Number of sandboxes to start until the stock is full."""
        return max(self.warm_spec.count - len(self.instances), 0)

    def ready(self, nodes: Collection[Node]) -> Instance | None:
        """Return the oldest ready sandbox on one of `nodes`; None if no sandbox is ready there."""
        ready = (warm for warm in self.instances if warm.state is SandboxState.READY)
        return next((warm for warm in ready if warm.node in nodes), None)
