"""What a backend gives a box to hold on to."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from envkit.types import GRADER_HOME, Cause

from .channel import Survived


@dataclass(frozen=True, slots=True)
class HostResources:
    """How the parts of a box that lie outside it are reached, and ended.

    Attributes:
        cause: Once it is gone, says why, given the OOM kills that it survived; takes at most 2 s.
        kill: Ends everything in it and removes what it left; safe to repeat.
        let_go: Gives back what we hold of it while it runs on; None for nothing.
        sockets: The folder of its sockets on the host; None: they are reached through the agent.
        snapshot: Keeps its files and returns the name; None where that cannot be done.
        unenforced: What is not held of what others of its kind hold, such as ``"uid"``.
        look: Says what holds it up, as far as that is seen from outside; None where nothing is.
        disk_percent: Says how much of what it may write to its root is used; None where that is not bounded.
        grader_home: The folder, named as inside, for what only a grader may touch.
        on_survived: Called when its agent reports an OOM kill that it survived; returns at once. None for nothing.
    """

    cause: Callable[[Survived], Awaitable[Cause]]
    kill: Callable[[], Awaitable[None]]
    let_go: Callable[[], None] | None = None
    sockets: Path | None = None
    snapshot: Callable[[], Awaitable[str]] | None = None
    unenforced: tuple[str, ...] = ()
    look: Callable[[], Awaitable[str]] | None = None
    disk_percent: Callable[[], int] | None = None
    grader_home: str = GRADER_HOME
    on_survived: Callable[[], None] | None = None
