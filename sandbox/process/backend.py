"""The backend `process`: sandboxes that are plain child processes without isolation, for hosts without bubblewrap.

A sandbox inherits no environment variables and has its sockets in a private folder. Its processes and files are removed
when it is stopped or this process exits. Its programs can read and change everything that our user can.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Self

import anyio

from envkit import clock
from envkit.errors import SandboxRefusedError
from envkit.types import Cause, SandboxSpec

from .. import agent
from ..agent_client.channel import AgentChannel, SocketStream, Survived
from ..agent_client.resources import HostResources
from ..agent_client.sandbox import AgentSandbox
from ..host import layout, run_dirs
from ..host.child_process import Child, cause_of, signal_in
from ..host.instances import LiveSandboxes, refuse

_ENV = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"}
_CAUSE_S = 2.0
_GRACE_S = 2.0
"""How long the agent may take to end its programs after its channel was closed."""
_CAPABILITIES = ("isolation", "network", "memory", "pids", "cpu", "disk", "uid", "seccomp")


class ProcessBackend:
    """Starts sandboxes as plain child processes; implements `envkit.protocols.SandboxBackend`.

    Use it as ``async with ProcessBackend() as backend``; leaving the block stops all sandboxes. A sandbox has the
    variables ``ENVKIT_SOCKETS``, ``HOME``, ``TMPDIR``, ``PATH`` and ``LANG``, and the variables of its spec.
    """

    def __init__(self) -> None:
        self._sandboxes = LiveSandboxes("process")
        self._opening = b""

    def capabilities(self) -> Mapping[str, bool]:
        """Return False for every capability, because this backend enforces nothing."""
        return dict.fromkeys(_CAPABILITIES, False)

    def disks(self) -> Mapping[str, tuple[int, int]]:
        """Return for each disk that sandboxes need the free MiB and the MiB that must stay free."""
        return self._sandboxes.disks()

    async def start(self, spec: SandboxSpec) -> AgentSandbox:
        """Start a sandbox; see `envkit.protocols.SandboxBackend.start`.

        Refuses limits and untrusted programs, because this backend cannot enforce them.
        """
        sandbox_id = self._sandboxes.new_id()
        refuse(sandbox_id, spec, self.capabilities())
        asked = {
            "image": spec.image,
            "runtime": spec.runtime,
            "detached": spec.detached or None,
            "views": spec.views or None,
        }
        for field, value in asked.items():
            if value is not None:
                raise SandboxRefusedError(sandbox_id, f"{field}={value} is refused: plain processes do not support it")
        folder = self._sandboxes.new_folder(sandbox_id)
        home, sockets, grader_home = folder / "home", folder / "s", folder / "grader"
        for part in (home, sockets, grader_home):
            part.mkdir(mode=0o700)
        ours, theirs = socket.socketpair()
        child = Child(agent.command(sys.executable), env={}, stream=theirs, folder=home)
        stream = SocketStream(ours)
        resources = HostResources(
            cause=partial(_cause, child),
            kill=partial(_kill, child, folder),
            sockets=sockets,
            unenforced=_CAPABILITIES,
            grader_home=str(grader_home),
        )
        sandbox = AgentSandbox(
            sandbox_id, AgentChannel(stream), resources, work=str(home), forget=self._sandboxes.forget
        )
        self._sandboxes.add(sandbox)
        with suppress(ConnectionError):  # The agent has already ended. The call of `started` below raises the reason.
            await stream.send(self._opening)
        env = {"ENVKIT_SOCKETS": str(sockets), "HOME": str(home), "TMPDIR": str(home), **_ENV, **spec.env}
        paths = {"work": str(home), "grader_home": str(grader_home)}
        config = layout.config(spec, env, spec.command, has_users=False, is_root=False, **paths)
        await sandbox.started(config, spec.start_timeout_s)
        return sandbox

    async def restore(self, snapshot: str, spec: SandboxSpec) -> AgentSandbox:
        """Raise `SandboxRefusedError`, because plain processes have no snapshots."""
        raise SandboxRefusedError(self._sandboxes.new_id(), f"snapshot {snapshot!r}: plain processes have no snapshots")

    async def snapshot_bytes(self, snapshot: str) -> int:
        """Return 0, because plain processes have no snapshots."""
        return 0

    async def remove_snapshot(self, snapshot: str) -> None:
        """Do nothing, because plain processes have no snapshots."""

    async def __aenter__(self) -> Self:
        await self._sandboxes.open()
        self._opening = agent.opening()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._sandboxes.close()


async def _cause(child: Child, survived: Survived) -> Cause:
    with anyio.move_on_after(_CAUSE_S):
        await child.wait()
    return cause_of(signal_in(child.returncode), child.last_line())


async def _kill(child: Child, folder: Path) -> None:
    await child.end(grace_s=_GRACE_S)
    with anyio.CancelScope(shield=True):
        await clock.to_thread(run_dirs.remove, folder)
