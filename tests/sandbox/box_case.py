"""What the tests of boxes share: a box whose agent and hold the test plays."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

import anyio
import anyio.lowlevel

from envkit.sandbox.agent_client.channel import AgentChannel, Survived
from envkit.sandbox.agent_client.resources import HostResources
from envkit.sandbox.agent_client.sandbox import AgentSandbox
from envkit.types import Cause
from tests.causes import cause
from tests.sandbox.agent_client.peer import HELLO, Peer

COMMAND: dict[str, Any] = {"command": ["sleep", "1000"]}
RESULT: dict[str, Any] = {"code": 0, "timed_out": False, "cut": 0, "duration_s": 0.5}


class Case:
    """A box, the agent that the test plays, and what the box has done with its hold.

    Attributes:
        cause: What the hold says; an exception is raised.
        survived: What the hold was told when it was asked.
        cause_s: How long that takes.
        kill: What killing comes to; an exception is raised.
        kill_s: How long that takes.
        done: What was done, in order.
    """

    def __init__(self, **hold: Any) -> None:
        self.peer = Peer()
        self.cause: Cause | str | Exception = "killed by signal 9 (SIGKILL)"
        self.survived: Survived | None = None
        self.cause_s = 0.0
        self.kill: Exception | None = None
        self.kill_s = 0.0
        self.done: list[str] = []
        self.channel = AgentChannel(self.peer)
        self.box = AgentSandbox(
            "case-1",
            self.channel,
            HostResources(
                cause=self._cause, kill=self._kill, release_resources=lambda: self.done.append("let go"), **hold
            ),
            work="/workspace",
            forget=lambda box: self.done.append("forgotten"),
        )

    async def started(self) -> Case:
        """Play the agent of a box that starts as it should."""
        self.peer.say(HELLO)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.box.started, COMMAND, 5)
            assert (await self.peer.heard())[0] == {"config": COMMAND}
            await self.peer.answer(do="ping")
        return self

    async def _cause(self, survived: Survived) -> Cause:
        self.survived = survived
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
    """Return what `call` returns when it is answered by `end`."""
    found = []

    async def ask() -> None:
        found.append(await call)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        header, _ = await case.peer.heard()
        case.peer.say({"id": header["id"], **end})
    return found[0]
