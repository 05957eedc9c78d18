"""How a box ends: with its channel. Why is found out, and what it consisted of is given back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import anyio

from envkit.errors import EnvkitError, SandboxError
from envkit.types import Cause, CauseKind

from .channel import AgentChannel
from .resources import HostResources

_CAUSE_S = 3.0
_KILL_S = 15.0
_FAREWELLS = {
    CauseKind.KILLED: "killed by signal 15 (SIGTERM)",
    CauseKind.OUT_OF_MEMORY: "out of memory",
    CauseKind.EXPIRED: "its time to live is over",
    CauseKind.ORPHANED: "nobody was connected to it for its orphan_ttl_s",
    CauseKind.STOPPED: "its connection was closed",
}
"""Details for the farewells of an agent; of other kinds, the exit code and the last line of standard error say more."""


class Teardown:
    """The end of one box, which begins by itself when its channel ends.

    Args:
        sandbox_id: Its id.
        channel: To its agent.
        resources: What it consists of.
        forget: Called once nothing is left of it.

    Attributes:
        is_released: Whether what it consists of is let go then and runs on, instead of being ended.
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
        """Return, once the box is gone, why."""
        await self._has_cause.wait()
        assert self._cause is not None
        return self._cause

    async def stop(self) -> None:
        """End the box, unless it has ended, and wait until nothing is left of it; not cancelled, bounded (15 s).

        Raises:
            SandboxError: That did not succeed.
        """
        if not self._channel.is_ended:
            self._cause = Cause(CauseKind.STOPPED, "stopped")
            self._channel.close()
        with anyio.CancelScope(shield=True):
            await self._is_torn_down.wait()
        if self._failure is not None:
            raise SandboxError(self._failure)

    def while_alive(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Have `work` done beside everything else; it is cancelled when the box is gone."""
        task = self._channel.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _on_end(self) -> None:
        # A box ends when it likes, so no task group is open for this.
        self._teardown_task = self._channel.loop.create_task(self._tear_down())

    async def _tear_down(self) -> None:
        """Find out why it ended, and give back what it consists of."""
        if self._cause is None:
            self._cause = self._channel.reason or await self._find_cause()
        self._has_cause.set()
        for task in self._tasks:
            task.cancel()
        try:
            with anyio.move_on_after(_KILL_S) as limit:
                if not self.is_released:
                    await self._resources.kill()
                elif self._resources.let_go is not None:
                    self._resources.let_go()
            if limit.cancelled_caught:
                self._failure = f"{self._id} could not be ended within {_KILL_S:g} s"
        except Exception as error:  # whatever it is, somebody waits for the end
            self._failure = f"{self._id} could not be ended: {error}"
        finally:
            self._forget()
            self._is_torn_down.set()

    async def _find_cause(self) -> Cause:
        channel = self._channel
        try:
            with anyio.move_on_after(_CAUSE_S):
                found = await self._resources.cause(channel.survived)
                # A code alone does not tell a command's end from the agent's own; a container may be removed by now.
                is_known = found.kind is CauseKind.EXITED
                is_removed = found.kind is CauseKind.BACKEND_LOST and channel.farewell in _FAREWELLS
                if channel.farewell is None or not (is_known or is_removed):
                    return found
                is_own = channel.farewell in (CauseKind.EXITED, CauseKind.OUT_OF_MEMORY)
                return Cause(channel.farewell, _FAREWELLS.get(channel.farewell, found.detail), is_own)
        except (EnvkitError, OSError):
            pass
        except Exception as error:  # whatever it is, somebody waits to be told
            return Cause(CauseKind.UNKNOWN, f"it has ended, and why was not found out: {error!r}")
        return Cause(CauseKind.UNKNOWN, "it has ended")
