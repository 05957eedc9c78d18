"""Shared by the tests of sandboxes: a sandbox whose agent and host resources are played by the test."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

import anyio
import anyio.lowlevel

from envkit.sandbox.agent_client.channel import AgentChannel, Survived
from envkit.sandbox.agent_client.sandbox import AgentSandbox
from envkit.sandbox.agent_client.teardown import HostResources
from envkit.types import Cause
from tests.causes import cause
from tests.sandbox.agent_client.peer import HELLO, Peer

COMMAND: dict[str, Any] = {"command": ["sleep", "1000"]}
RESULT: dict[str, Any] = {"code": 0, "timed_out": False, "cut": 0, "duration_s": 0.5}


class Case:
    """A sandbox, its scripted agent, and a record of what the sandbox did with its host resources.

    Attributes:
        cause: What the host resources report as the cause of the end; an exception is raised.
        cause_s: How long finding the cause takes.
        kill: Exception that killing raises; None if it succeeds.
        kill_s: How long killing takes.
        done: Calls to the host resources, in order.
    """

    def __init__(self, **resources: Any) -> None:
        self.peer = Peer()
        self.cause: Cause | str | Exception = "killed by signal 9 (SIGKILL)"
        self.cause_s = 0.0
        self.kill: Exception | None = None
        self.kill_s = 0.0
        self.done: list[str] = []
        self.channel = AgentChannel(self.peer)
        self.sandbox = AgentSandbox(
            "case-1",
            self.channel,
            HostResources(
                cause=self._cause, kill=self._kill, release_resources=lambda: self.done.append("released"), **resources
            ),
            work="/workspace",
            forget=lambda sandbox: self.done.append("forgotten"),
        )

    async def started(self) -> Case:
        """Play the agent of a sandbox that starts without errors."""
        self.peer.emit(HELLO)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.sandbox.started, COMMAND, 5)
            assert (await self.peer.next_frame())[0] == {"config": COMMAND}
            await self.peer.answer(do="ping")
        return self

    async def _cause(self, _: Survived) -> Cause:
        self.done.append("asked")
        await anyio.sleep(self.cause_s)
        if isinstance(self.cause, Exception):
            raise self.cause
        return self.cause if isinstance(self.cause, Cause) else cause(self.cause)

    async def _kill(self) -> None:
        self.done.append("killed")
        await anyio.sleep(self.kill_s)
        if self.kill is not None:
            raise self.kill


async def answered(case: Case, call: Awaitable[Any], **end: Any) -> Any:
    """Return the result of `call` when the agent answers it with `end`."""
    found = []

    async def ask() -> None:
        found.append(await call)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        header, _ = await case.peer.next_frame()
        case.peer.emit({"id": header["id"], **end})
    return found[0]
