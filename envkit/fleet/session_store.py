"""Session store: which episode is in which sandbox, across server restarts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from envkit.types import Task


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """Location of an episode.

    Attributes:
        sandbox_id: Id of its sandbox.
        session: Id of its session on that sandbox's env server.
        task: Its task.
    """

    sandbox_id: str
    session: str
    task: Task


class SessionStore(Protocol):
    """Persists the location of each episode across server restarts."""

    def keys(self) -> Sequence[str]:
        """Return the keys of all recorded episodes."""
        ...

    def get(self, key: str) -> SessionRecord | None:
        """Return the location of the episode of this key; None if it is not recorded."""
        ...

    async def record(self, key: str, record: SessionRecord) -> None:
        """Record an episode's location; returns once it is persisted."""
        ...

    async def forget(self, *keys: str) -> None:
        """Forget episodes; shielded from cancellation."""
        ...
