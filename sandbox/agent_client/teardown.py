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
        hold: What it consists of.
        forget: Called once nothing is left of it.

    Attributes:
        lets_go: Whether what it consists of is let go then and runs on, instead of being ended.
    """

    def __init__(self, sandbox_id: str, channel: AgentChannel, hold: HostResources, forget: Callable[[], None]) -> None:
        self.lets_go = False
        self._id = sandbox_id
        self._channel = channel
        self._hold = hold
        self._forget = forget
        self._companions: set[asyncio.Task[None]] = set()
        self._cause: Cause | None = None
        self._failure: str | None = None
        self._is_lost = anyio.Event()
        self._is_gone = anyio.Event()
        self._burial: asyncio.Task[None] | None = None
        channel.on_survived = hold.on_survived
        channel.when_ended(self._on_end)

    async def cause(self) -> Cause:
        """Return, once the box is gone, why."""
        await self._is_lost.wait()
        assert self._cause is not None
        return self._cause

    async def bring_about(self) -> None:
        """End the box, unless it has ended, and wait until nothing is left of it; not cancelled, bounded (15 s).

        Raises:
            SandboxError: That did not succeed.
        """
        if not self._channel.is_ended:
            self._cause = Cause(CauseKind.STOPPED, "stopped")
            self._channel.close()
        with anyio.CancelScope(shield=True):
            await self._is_gone.wait()
        if self._failure is not None:
            raise SandboxError(self._failure)

    def while_alive(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Have `work` done beside everything else; it is cancelled when the box is gone."""
        task = self._channel.loop.create_task(work)
        self._companions.add(task)
        task.add_done_callback(self._companions.discard)
        return task

    def _on_end(self) -> None:
        # A box ends when it likes, so no task group is open for this.
        self._burial = self._channel.loop.create_task(self._bury())

    async def _bury(self) -> None:
        """Find out why it ended, and give back what it consists of."""
        if self._cause is None:
            self._cause = self._channel.reason or await self._found_cause()
        self._is_lost.set()
        for companion in self._companions:
            companion.cancel()
        try:
            with anyio.move_on_after(_KILL_S) as limit:
                if not self.lets_go:
                    await self._hold.kill()
                elif self._hold.let_go is not None:
                    self._hold.let_go()
            if limit.cancelled_caught:
                self._failure = f"{self._id} could not be ended within {_KILL_S:g} s"
        except Exception as error:  # whatever it is, somebody waits for the end
            self._failure = f"{self._id} could not be ended: {error}"
        finally:
            self._forget()
            self._is_gone.set()

    async def _found_cause(self) -> Cause:
        channel = self._channel
        try:
            with anyio.move_on_after(_CAUSE_S):
                found = await self._hold.cause(channel.survived)
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
