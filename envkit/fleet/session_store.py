"""Session store: records in which sandbox each episode runs, so that the server can resume episodes after a restart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from envkit.types import Task, TenantKey


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """The place where an episode runs.

    Attributes:
        sandbox_id: Id of the sandbox.
        session: Id that the env server in that sandbox uses for the episode.
        task: Task of the episode.
    """

    sandbox_id: str
    session: str
    task: Task


class SessionStore(Protocol):
    """Stores where each episode runs; the records survive a restart of the server."""

    def keys(self) -> Sequence[TenantKey]:
        """Return the keys of all recorded episodes."""
        ...

    def get(self, key: TenantKey) -> SessionRecord | None:
        """Return where the episode `key` runs; None if it is not recorded."""
        ...

    async def record(self, key: TenantKey, record: SessionRecord) -> None:
        """Record where the episode `key` runs; return when the record is written."""
        ...

    async def forget(self, *keys: TenantKey) -> None:
        """Delete the records of the episodes `keys`. A cancelled call still completes the deletion."""
        ...
