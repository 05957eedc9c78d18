"""A container attached by its standard streams, which ends when they close."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import anyio

from envkit import clock
from envkit.errors import SandboxError
from envkit.types import JSON, Cause, CauseKind, SandboxSpec

from ..agent_client.channel import Survived
from ..host import agent_cgroup, oom_score, run_dirs
from ..host.agent_cgroup import AgentCgroup
from ..host.layout import CONTROL_DIR, CONTROL_SOCKET, SHARED_PER_UID, SOCKETS
from ..host.pid1 import FirstProcess
from . import container_config, orphans
from .api import LATE_EVENT_S, Daemon, DaemonError
from .attach_stream import AttachStream

_CAUSE_S = 2.0
_LINE_CHARACTERS = 300
_TTY_GROUP = "5"
"""Group id that Docker assigns to terminals."""
NOT_REACHABLE = "detached sandboxes need root on the daemon's machine"


class MissingProgramError(Exception):
    """The image has no such program."""


@dataclass(frozen=True, slots=True)
class DiskPaths:
    """Paths on this host's disk that a container writes to.

    Attributes:
        folders: Folders with the changes to its image, and its other files.
        first_pid: Host pid of its process 1.
    """

    folders: tuple[Path, ...]
    first_pid: int


class AttachedContainer:
    """A container that runs or is being started.

    Args:
        daemon: Its daemon.
        container_id: The daemon's id of it.
        stream: Its standard streams.
        removes_itself: Whether the daemon removes it as soon as it has exited.

    Attributes:
        id: The daemon's id of it.
        stream: Its standard streams.
        agent_group: The memory cgroup of the agent's programs; None if they have none of their own.
    """

    def __init__(
        self, daemon: Daemon, container_id: str, stream: AttachStream, *, removes_itself: bool = False
    ) -> None:
        self.id = container_id
        self.stream = stream
        self.agent_group: AgentCgroup | None = None
        self._daemon = daemon
        self._removes_itself = removes_itself
        self._began_s = int(clock.wall())

    async def kill(self) -> None:
        """Kill and remove it; safe to repeat.

        Raises:
            DaemonError: The daemon does not answer.
        """
        self.stream.close()
        await self._daemon.remove(self.id)

    async def volumes(self) -> Mapping[str, Path]:
        """Return the host paths of its volumes by their paths inside; empty if we cannot access them."""
        return await volumes(self._daemon, self.id)

    async def apply_limits(self, spec: SandboxSpec) -> Mapping[str, Path]:
        """Set the limits that the daemon has no options for, if this host can; return `volumes`."""
        volumes = await self.volumes()
        if (first := await self._first_process(volumes)) is not None:
            with closing(first):
                with suppress(OSError):
                    first.limit_terminals({"gid": _TTY_GROUP})
                if lends_score(self._daemon, spec):
                    await clock.to_thread(self._lend, first, container_config.ContainerLimits.of(spec).memory_mib)
        return volumes

    def _lend(self, first: FirstProcess, memory_mib: int) -> None:
        """Let process 1 set OOM scores, and make a memory cgroup for the agent's programs."""
        lent: dict[str, str] = {}
        group = agent_cgroup.of_container(self.id, first.pid)
        if group is not None:
            with suppress(OSError):
                group.make(memory_mib)
                lent[str(group.join_file)] = agent_cgroup.INSIDE
        try:
            oom_score.lend(first, lent)
        except OSError:
            if group is not None:
                group.remove()
        else:
            self.agent_group = group if lent else None

    async def find_agent_group(self, volumes: Mapping[str, Path]) -> None:
        """Set `agent_group` of a container that is already running."""
        if (first := await self._first_process(volumes)) is not None:
            with closing(first):
                group = agent_cgroup.of_container(self.id, first.pid)
                self.agent_group = group if group is not None and group.exists else None

    async def _first_process(self, volumes: Mapping[str, Path]) -> FirstProcess | None:
        """Return its process 1 on this host, verified by its mounts; None if it is not visible here."""
        if SOCKETS not in volumes:
            return None
        found = await self._daemon.inspect(self.id) or {"State": {"Pid": 0}}
        try:
            first = FirstProcess(int(found["State"]["Pid"]))
        except OSError:
            return None
        with suppress(OSError):
            if first.folder(SOCKETS).samefile(volumes[SOCKETS]):
                return first
        first.close()
        return None

    async def disk_paths(self, spec: SandboxSpec) -> DiskPaths | None:
        """Return the host paths that it writes to; None if there are none or they are not readable."""
        if spec.profile != "system" or not _is_open(self._daemon):
            return None
        found = await self._daemon.inspect(self.id) or {}
        layer = ((found.get("GraphDriver") or {}).get("Data") or {}).get("UpperDir") or ""
        if not os.access(layer, os.R_OK):
            return None
        volumes = [mount["Source"] for mount in found.get("Mounts", ()) if mount["Type"] == "volume"]
        on_disk = [Path(volume) for volume in volumes if not os.path.ismount(volume)]  # noqa: ASYNC240
        own = Path(found["HostsPath"]).parent  # /etc/hosts and other files are stored separately
        return DiskPaths((Path(layer), own, *on_disk), int(found["State"]["Pid"]))

    async def diagnose(self) -> str:
        """Return ``"paused"`` if it is paused; empty otherwise.

        Raises:
            DaemonError: The daemon does not answer.
        """
        found = await self._daemon.inspect(self.id)
        return "paused" if found is not None and found["State"].get("Paused") else ""

    async def cause(self, survived: Survived) -> Cause:
        """Return why it ended; takes at most 2 s."""
        lines = self.stream.stderr.decode(errors="replace").strip().splitlines() or [""]
        with anyio.move_on_after(_CAUSE_S):
            while True:
                try:
                    why = await self._cause(lines[-1][-_LINE_CHARACTERS:], survived)
                except DaemonError as error:
                    return Cause(CauseKind.BACKEND_LOST, str(error))
                if why is not None:
                    return why
                await anyio.sleep(0.02)  # the daemon records the exit slightly after the streams end
        return Cause(CauseKind.BACKEND_LOST, "its streams ended")

    async def _cause(self, last_line: str, survived: Survived) -> Cause | None:
        found = await self._daemon.inspect(self.id)
        out_of_memory = Cause(
            CauseKind.OUT_OF_MEMORY, "out of memory", by_agent=self._daemon.distinguishes_memory_limit
        )
        why: Cause | None = Cause(CauseKind.BACKEND_LOST, "removed")
        if found is not None:
            assumed = None if survived.oom_kills else out_of_memory
            why = container_config.cause(found["State"], last_line, out_of_memory=assumed)
            if why is None or why.kind is not CauseKind.KILLED:
                return why
        since_s = survived.at_s + LATE_EVENT_S if survived.oom_kills else self._began_s
        is_out_of_memory, code = await self._daemon.end_since(self.id, since_s)
        if is_out_of_memory:
            return out_of_memory
        if found is None and self._removes_itself and code is not None:
            return container_config.cause({"ExitCode": code}, last_line)
        return why


def lends_score(daemon: Daemon, spec: SandboxSpec) -> bool:
    """Whether process 1 alone may change OOM scores, which needs root on the daemon's machine."""
    return _is_open(daemon) and spec.profile == "strict" and spec.runtime is None


def shared(daemon: Daemon) -> tuple[str, ...]:
    """Return the kernel resources that a daemon's sandboxes share with each other and with host uids 1000 and 1001."""
    return SHARED_PER_UID if _is_open(daemon) else (*SHARED_PER_UID, "terminals")


def _is_open(daemon: Daemon) -> bool:
    """Whether we are root on (probably) the daemon's machine."""
    return daemon.is_near and os.geteuid() == 0


async def volumes(daemon: Daemon, container_id: str) -> Mapping[str, Path]:
    """Return the host paths of a container's volumes by their paths inside; empty if we cannot access them."""
    if not _is_open(daemon):
        return {}
    found = await daemon.inspect(container_id) or {}
    return {
        mount["Destination"]: Path(mount["Source"])
        for mount in found.get("Mounts", ())
        if os.path.ismount(mount["Source"])  # noqa: ASYNC240 - does not block
    }


def connect(volumes: Mapping[str, Path]) -> socket.socket:
    """Return a connected, non-blocking stream to the detached sandbox with these volumes.

    Raises:
        SandboxError: Its volumes are not accessible from here.
        UnreachableError: Nothing listens.
    """
    if CONTROL_DIR not in volumes:
        raise SandboxError(NOT_REACHABLE)
    return run_dirs.connect(volumes[CONTROL_DIR], CONTROL_SOCKET)


async def run(daemon: Daemon, options: Mapping[str, JSON], opening: bytes) -> AttachedContainer:
    """Create, attach to and start a container, and write `opening` to its process 1.

    Raises:
        MissingProgramError: The image has no such program.
        DaemonError: It cannot be created or started for another reason.
    """
    made = cast("dict[str, str]", options["Labels"])
    container_id = await daemon.create(options, orphans.pending_creation(made))
    stream: AttachStream | None = None
    try:
        stream = await daemon.attach(container_id)
        removes_itself = bool(cast("Mapping[str, JSON]", options["HostConfig"])["AutoRemove"])
        attached = AttachedContainer(daemon, container_id, stream, removes_itself=removes_itself)
        stream.start_sending(opening)
        await daemon.start(container_id)
    except BaseException as error:
        with anyio.CancelScope(shield=True):
            if stream is not None:
                stream.close()
            await daemon.remove(container_id)
        program = options["Entrypoint"]
        missing = f'exec: "{program[0]}"' if isinstance(program, list) else str(program)
        if isinstance(error, DaemonError) and missing in str(error):  # library's message: docker
            raise MissingProgramError from None
        raise
    return attached
