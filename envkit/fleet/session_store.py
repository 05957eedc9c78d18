"""Which episode is in which box, for the next server to know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from envkit.types import Task


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """Where an episode is.

    Attributes:
        box: Id of its sandbox.
        session: Name of its session on the server in there.
        task: What it plays.
    """

    box: str
    session: str
    task: Task


class SessionStore(Protocol):
    """Knows, beyond the life of a server, which episode is in which box."""

    def seated(self) -> Sequence[str]:
        """Return the keys of all episodes that are somewhere."""
        ...

    def seat(self, key: str) -> SessionRecord | None: ...

    async def sit(self, key: str, seat: SessionRecord) -> None:
        """Return once it is written down."""
        ...

    async def leave(self, key: str) -> None:
        """Return once it is forgotten; not cancelled."""
        ...
