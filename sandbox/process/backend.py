"""The backend `process`: sandboxes that are plain child processes without isolation, for hosts without bubblewrap.

A sandbox inherits no environment variables and has its sockets in a private folder. When a sandbox is stopped or this
process exits, the sandbox's processes and files are removed. Its programs have all rights of the user of this process.
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
from envkit.protocols import SandboxBackend
from envkit.types import Cause, SandboxSpec

from .. import agent
from ..agent_client.channel import AgentChannel, SocketStream, Survived
from ..agent_client.sandbox import AgentSandbox
from ..agent_client.teardown import HostResources
from ..host import layout, run_dirs
from ..host.child_process import Child, cause_of
from ..host.instances import LiveSandboxes, refuse

_ENV = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"}
_CAUSE_S = 2.0
_GRACE_S = 2.0
"""Seconds that the agent may take to end its programs after the host has closed the channel."""
_CAPABILITIES = ("isolation", "network", "memory", "pids", "cpu", "disk", "uid", "seccomp")


class ProcessBackend(SandboxBackend):
    """Starts sandboxes as plain child processes; implements `envkit.protocols.SandboxBackend`.

    Use it as ``async with ProcessBackend() as backend``; leaving the block stops all sandboxes. Programs get the
    environment variables ``ENVKIT_SOCKETS``, ``HOME``, ``TMPDIR``, ``PATH``, ``LANG`` and those of the spec.
    """

    def __init__(self) -> None:
        self._sandboxes = LiveSandboxes("process")
        self._opening = b""

    def capabilities(self) -> Mapping[str, bool]:
        """Return False for every capability, because this backend enforces nothing."""
        return dict.fromkeys(_CAPABILITIES, False)

    def disks(self) -> Mapping[str, tuple[int, int]]:
        """Return for each disk that sandboxes use how many MiB are free, and how many MiB must stay free."""
        return self._sandboxes.disks()

    async def start(self, spec: SandboxSpec) -> AgentSandbox:
        """Start a sandbox; see `envkit.protocols.SandboxBackend.start`.

        Refuses a spec that has limits or is for untrusted programs, because this backend enforces and isolates nothing.
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
                raise SandboxRefusedError(sandbox_id, f"the backend `process` does not support {field}={value}")
        folder = self._sandboxes.folder / sandbox_id
        home, sockets, grader_home = folder / "home", folder / "s", folder / "grader"
        for part in (folder, home, sockets, grader_home):
            part.mkdir(mode=0o700)
        ours, theirs = socket.socketpair()
        child = Child(agent.command(sys.executable), env={}, stream=theirs, folder=home)
        stream = await SocketStream.open(ours)
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
        with suppress(ConnectionError):  # The agent has already ended. `started` will raise an error with the reason.
            await stream.send(self._opening)
        env = {"ENVKIT_SOCKETS": str(sockets), "HOME": str(home), "TMPDIR": str(home), **_ENV, **spec.env}
        paths = {"work": str(home), "grader_home": str(grader_home)}
        config = layout.config(spec, env, spec.command, has_users=False, is_root=False, **paths)
        await sandbox.started(config, spec.start_timeout_s)
        return sandbox

    async def restore(self, snapshot: str, spec: SandboxSpec) -> AgentSandbox:
        """Raise `SandboxRefusedError`, because plain processes have no snapshots."""
        raise SandboxRefusedError(self._sandboxes.new_id(), f"snapshot {snapshot!r}: this backend has no snapshots")

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
    return cause_of(child.returncode, child.last_line())


async def _kill(child: Child, folder: Path) -> None:
    await child.end(grace_s=_GRACE_S)
    with anyio.CancelScope(shield=True):
        await clock.to_thread(run_dirs.remove, folder)
