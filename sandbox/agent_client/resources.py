"""The resources of a sandbox on the host, which the sandbox's backend provides."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from envkit.types import GRADER_HOME, Cause
from envkit.types.sandboxes import Blocked

from .channel import Survived


@dataclass(frozen=True, slots=True)
class HostResources:
    """Callbacks and paths with which the host reaches, inspects and ends a sandbox.

    Attributes:
        cause: Receives the OOM kills that the sandbox survived; returns within 3 s why the sandbox has ended.
        kill: Kills all processes of the sandbox and removes its files and other resources; may be called repeatedly.
        release_resources: Closes the host's handles without ending the sandbox; None if there are no handles.
        sockets: Host folder that contains the sandbox's sockets; None to connect through the agent instead.
        snapshot: Saves the sandbox's files and returns the snapshot's name; None if snapshots are not supported.
        unenforced: Limits that this sandbox does not enforce although its backend usually does, such as ``"uid"``.
        diagnose: Returns why the sandbox is blocked; None if the host cannot inspect the sandbox.
        disk_percent: Returns how full the root file system is, in percent of its limit; None if it has no limit.
        grader_home: Path inside the sandbox of the folder that only a grader can access.
        on_survived: Called when the sandbox has survived an OOM kill; must not block. None for no callback.
    """

    cause: Callable[[Survived], Awaitable[Cause]]
    kill: Callable[[], Awaitable[None]]
    release_resources: Callable[[], None] | None = None
    sockets: Path | None = None
    snapshot: Callable[[], Awaitable[str]] | None = None
    unenforced: tuple[str, ...] = ()
    diagnose: Callable[[], Awaitable[Blocked]] | None = None
    disk_percent: Callable[[], int] | None = None
    grader_home: str = GRADER_HOME
    on_survived: Callable[[], None] | None = None
