"""Sandboxes that isolate nothing: plain child processes, for machines without bubblewrap.

What is kept all the same: nothing is inherited from our environment, sockets lie in a private folder, and nothing is
left when the sandbox is stopped or we die. What runs there may read and change whatever our user may.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import anyio

from envkit import clock
from envkit.errors import SandboxRefusedError
from envkit.types import JSON, Cause, SandboxSpec

from .. import agent
from ..agent_client.channel import AgentChannel, SocketStream, Survived
from ..agent_client.resources import HostResources
from ..agent_client.sandbox import AgentSandbox
from ..host import run_dirs
from ..host.child_process import Child, cause_of, signal_in
from ..host.instances import LiveSandboxes, refuse

_CAUSE_S = 2.0
_GRACE_S = 2.0
"""Seconds that the agent, which is told by the end of its channel, has to end whoever it started."""
_CAPABILITIES = ("isolation", "network", "memory", "pids", "cpu", "disk", "uid", "seccomp")


class ProcessBackend:
    """Starts plain child processes; satisfies `envkit.protocols.SandboxBackend`.

    Used as ``async with ProcessBackend() as backend``; leaving the block stops what still runs. A box has
    ``ENVKIT_SOCKETS``, ``HOME``, ``TMPDIR``, ``PATH`` and ``LANG`` set, and what its spec names.
    """

    def __init__(self) -> None:
        self._boxes = LiveSandboxes("process")
        self._opening = b""

    def capabilities(self) -> Mapping[str, bool]:
        """Nothing is enforced."""
        return dict.fromkeys(_CAPABILITIES, False)

    def disks(self) -> Mapping[str, tuple[int, int]]:
        """Return the disks that boxes and snapshots need: MiB free, and those that must be."""
        return self._boxes.disks()

    async def start(self, spec: SandboxSpec) -> AgentSandbox:
        """Start `spec`; see `envkit.protocols.SandboxBackend.start`. Bounds and hostile programs are refused."""
        sandbox_id = self._boxes.new_id()
        refuse(sandbox_id, spec, self.capabilities())
        asked = {
            "image": spec.image,
            "runtime": spec.runtime,
            "detached": spec.detached or None,
            "views": spec.views or None,
        }
        for field, value in asked.items():
            if value is not None:
                raise SandboxRefusedError(sandbox_id, f"{field}={value} is refused: a plain process has no such thing")
        folder = self._boxes.new_folder(sandbox_id)
        home, sockets, grader_home = folder / "home", folder / "s", folder / "grader"
        for part in (home, sockets, grader_home):
            part.mkdir(mode=0o700)
        ours, theirs = socket.socketpair()
        child = Child(agent.command(sys.executable), env={}, stream=theirs, folder=home)
        stream = SocketStream(ours)
        hold = HostResources(
            cause=partial(_cause, child),
            kill=partial(_kill, child, folder),
            sockets=sockets,
            unenforced=_CAPABILITIES,
            grader_home=str(grader_home),
        )
        box = AgentSandbox(sandbox_id, AgentChannel(stream), hold, work=str(home), forget=self._boxes.forget)
        self._boxes.add(box)
        with suppress(ConnectionError):  # then it has ended, which the next line finds out
            await stream.send(self._opening)
        await box.started(_config(spec, home, sockets, grader_home), spec.start_timeout_s)
        return box

    async def restore(self, snapshot: str, spec: SandboxSpec) -> AgentSandbox:
        """Raise: plain processes have no snapshots."""
        raise SandboxRefusedError(self._boxes.new_id(), f"snapshot {snapshot!r}: plain processes have none")

    async def snapshot_bytes(self, snapshot: str) -> int:
        """Return 0: plain processes have no snapshots."""
        return 0

    async def remove_snapshot(self, snapshot: str) -> None:
        """Return at once: plain processes have no snapshots."""

    async def __aenter__(self) -> Self:
        await self._boxes.open()
        self._opening = agent.opening()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._boxes.close()


def _config(spec: SandboxSpec, home: Path, sockets: Path, grader_home: Path) -> dict[str, JSON]:
    env = {
        "ENVKIT_SOCKETS": str(sockets),
        "HOME": str(home),
        "TMPDIR": str(home),
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "LANG": "C.UTF-8",
    }
    return {
        "agent_uid": None,
        "grader_uid": None,
        "grader_home": str(grader_home),
        "env": {**env, **spec.env},
        "work": str(home),
        "command": list(spec.command) or None,
        "ttl_s": spec.ttl_s,
        "detached": False,
        "door": None,
    }


async def _cause(child: Child, survived: Survived) -> Cause:
    with anyio.move_on_after(_CAUSE_S):
        await child.wait()
    return cause_of(signal_in(child.returncode), child.last_line())


async def _kill(child: Child, folder: Path) -> None:
    await child.end(grace_s=_GRACE_S)
    with anyio.CancelScope(shield=True):
        await clock.to_thread(run_dirs.remove, folder)
