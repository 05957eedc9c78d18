"""Tears a sandbox down when the channel to its agent ends: finds the cause and removes the sandbox from the host."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio

from envkit.errors import EnvkitError, SandboxError
from envkit.types import GRADER_HOME, Cause, CauseKind
from envkit.types.sandboxes import Blocked

from .channel import AgentChannel, Survived

_CAUSE_S = 3.0
_KILL_S = 15.0
_FAREWELLS = {
    CauseKind.KILLED: "killed by signal 15 (SIGTERM)",
    CauseKind.OUT_OF_MEMORY: "out of memory",
    CauseKind.EXPIRED: "time to live exceeded",
    CauseKind.ORPHANED: "no client connected for orphan_ttl_s",
    CauseKind.STOPPED: "its connection was closed",
}
"""Detail of the cause, by the kind that the agent reports. For other kinds, the backend's detail is used."""


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


class Teardown:
    """Tears one sandbox down. The teardown starts when the channel to the agent ends.

    The arguments are those of `envkit.sandbox.agent_client.sandbox.AgentSandbox`.

    Attributes:
        is_released: If True, the teardown leaves the sandbox running and only closes the host's handles of it.
    """

    def __init__(
        self, sandbox_id: str, channel: AgentChannel, resources: HostResources, forget: Callable[[], None]
    ) -> None:
        self.is_released = False
        self._id = sandbox_id
        self._channel = channel
        self._resources = resources
        self._forget = forget
        self._tasks: set[asyncio.Task[None]] = set()
        self._cause: Cause | None = None
        self._failure: str | None = None
        self._has_cause = anyio.Event()
        self._is_torn_down = anyio.Event()
        self._teardown_task: asyncio.Task[None] | None = None
        channel.on_survived = resources.on_survived
        channel.when_ended(self._on_end)

    async def cause(self) -> Cause:
        """Wait until the sandbox has ended and return the cause."""
        await self._has_cause.wait()
        assert self._cause is not None
        return self._cause

    async def stop(self) -> None:
        """End the sandbox and wait at most 15 s for its teardown. Cancellation does not interrupt this method.

        Raises:
            SandboxError: The sandbox could not be ended.
        """
        if not self._channel.is_ended:
            self._cause = Cause(CauseKind.STOPPED, "stopped")
            self._channel.close()
        with anyio.CancelScope(shield=True):
            await self._is_torn_down.wait()
        if self._failure is not None:
            raise SandboxError(self._failure)

    def while_alive(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work` in the background; cancel it when the sandbox has ended."""
        task = self._channel.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _on_end(self) -> None:
        # Do not use a task group, because the sandbox may end while no task group is open.
        self._teardown_task = self._channel.loop.create_task(self._tear_down())

    async def _tear_down(self) -> None:
        """Find the cause of the sandbox's end and release its resources."""
        if self._cause is None:
            self._cause = self._channel.reason or await self._find_cause()
        self._has_cause.set()
        for task in self._tasks:
            task.cancel()
        try:
            with anyio.move_on_after(_KILL_S) as limit:
                if not self.is_released:
                    await self._resources.kill()
                elif self._resources.release_resources is not None:
                    self._resources.release_resources()
            if limit.cancelled_caught:
                self._failure = f"{self._id} could not be ended within {_KILL_S:g} s"
        except Exception as error:  # Catch any error, because `stop` waits until the teardown has finished.
            self._failure = f"{self._id} could not be ended: {error}"
        finally:
            self._forget()
            self._is_torn_down.set()

    async def _find_cause(self) -> Cause:
        channel = self._channel
        try:
            with anyio.move_on_after(_CAUSE_S):
                found = await self._resources.cause(channel.survived)
                # Prefer the cause that the agent reported in two cases: the backend found only an exit code, which may
                # be that of the command or of the agent; or the container is already removed.
                is_known = found.kind is CauseKind.EXITED
                is_removed = found.kind is CauseKind.BACKEND_LOST and channel.farewell in _FAREWELLS
                if channel.farewell is None or not (is_known or is_removed):
                    return found
                is_own = channel.farewell in (CauseKind.EXITED, CauseKind.OUT_OF_MEMORY)
                return Cause(channel.farewell, _FAREWELLS.get(channel.farewell, found.detail), is_own)
        except (EnvkitError, OSError):
            pass
        except Exception as error:  # Catch any error, because callers wait until a cause is set.
            return Cause(CauseKind.UNKNOWN, f"it has ended; finding the cause failed: {error!r}")
        return Cause(CauseKind.UNKNOWN, "it has ended")
