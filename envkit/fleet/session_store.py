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

    def seated(self) -> Sequence[str]:
        """Return the keys of all recorded episodes."""
        ...

    def seat(self, key: str) -> SessionRecord | None: ...

    async def sit(self, key: str, seat: SessionRecord) -> None:
        """Record an episode's location; returns once it is persisted."""
        ...

    async def leave(self, key: str) -> None:
        """Forget an episode; shielded from cancellation."""
        ...
