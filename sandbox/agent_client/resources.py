"""The host resources of a sandbox, as its backend provides them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from envkit.types import GRADER_HOME, Cause

from .channel import Survived


@dataclass(frozen=True, slots=True)
class HostResources:
    """Callbacks and paths to reach and end a sandbox from the host.

    Attributes:
        cause: After its end, returns the cause, given the OOM kills that it survived; takes at most 2 s.
        kill: Ends all its processes and removes its leftovers; safe to repeat.
        let_go: Releases the host's handles while it continues to run; None for nothing.
        sockets: The folder of its sockets on the host; None if they are reached through the agent.
        snapshot: Saves its files and returns the name; None if unsupported.
        unenforced: Limits that this sandbox does not enforce but others of its kind do, such as ``"uid"``.
        diagnose: Returns why it is blocked, as far as the host can see; None if the host cannot inspect it.
        disk_percent: Returns the used share of its root's disk limit; None if there is no limit.
        grader_home: The folder, as seen inside, that only a grader may access.
        on_survived: Called when its agent reports an OOM kill that it survived; must not block. None for nothing.
    """

    cause: Callable[[Survived], Awaitable[Cause]]
    kill: Callable[[], Awaitable[None]]
    release_resources: Callable[[], None] | None = None
    sockets: Path | None = None
    snapshot: Callable[[], Awaitable[str]] | None = None
    unenforced: tuple[str, ...] = ()
    diagnose: Callable[[], Awaitable[str]] | None = None
    disk_percent: Callable[[], int] | None = None
    grader_home: str = GRADER_HOME
    on_survived: Callable[[], None] | None = None
