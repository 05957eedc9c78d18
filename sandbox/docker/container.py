"""A container whose standard streams are attached to us, on which its life hangs."""

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
from ..host.layout import SHARED_PER_UID, CONTROL_DIR, CONTROL_SOCKET, SOCKETS
from ..host.pid1 import FirstProcess
from . import container_config, orphans
from .api import LATE_EVENT_S, Daemon, DaemonError
from .attach_stream import AttachStream

_CAUSE_S = 2.0
_LINE_CHARACTERS = 300
_TTY_GROUP = "5"
"""The group that Docker gives terminals to."""
NO_WAY_BACK = "only root on the daemon's machine can come back to a box that stays"


class MissingProgramError(Exception):
    """The image has no such program."""


@dataclass(frozen=True, slots=True)
class Written:
    """What a container writes to the disk of this host.

    Attributes:
        places: Folders that hold what differs from its image.
        first_pid: Its process 1, as this host counts.
    """

    places: tuple[Path, ...]
    first_pid: int


class AttachedContainer:
    """A container, running or about to.

    Args:
        daemon: Whose it is.
        container_id: The daemon's name for it.
        stream: Its standard streams.
        removes_itself: Whether the daemon removes it as soon as it has ended.

    Attributes:
        id: The daemon's name for it.
        stream: Its standard streams.
        agent_group: The memory cgroup of the agent's programs; None where they have none of their own.
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
        """End everything in it and remove it; safe to repeat.

        Raises:
            DaemonError: The daemon does not answer.
        """
        self.stream.close()
        await self._daemon.remove(self.id)

    async def volumes(self) -> Mapping[str, Path]:
        """Return where on this host its volumes are, by their names inside; none where we cannot see that."""
        return await volumes(self._daemon, self.id)

    async def restricted(self, spec: SandboxSpec) -> Mapping[str, Path]:
        """Set from this host, if we can, the limits that the daemon has no options for; return `volumes`."""
        volumes = await self.volumes()
        if (first := await self._first_process(volumes)) is not None:
            with closing(first):
                with suppress(OSError):
                    first.limit_terminals({"gid": _TTY_GROUP})
                if lends_score(self._daemon, spec):
                    await clock.to_thread(self._lend, first, container_config.ContainerLimits.of(spec).memory_mib)
        return volumes

    def _lend(self, first: FirstProcess, memory_mib: int) -> None:
        """Let process 1 set OOM scores, and put the agent's programs into a memory cgroup of their own."""
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
        """Set `agent_group` of a container that was started before."""
        if (first := await self._first_process(volumes)) is not None:
            with closing(first):
                group = agent_cgroup.of_container(self.id, first.pid)
                self.agent_group = group if group is not None and group.exists else None

    async def _first_process(self, volumes: Mapping[str, Path]) -> FirstProcess | None:
        """Return its process 1 on this host, known by what is mounted there; None where we cannot see it."""
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

    async def written(self, spec: SandboxSpec) -> Written | None:
        """Return what it, made as `spec`, writes to the disk of this host; None for nothing, or where we cannot see."""
        if spec.profile != "system" or not _is_open(self._daemon):
            return None
        found = await self._daemon.inspect(self.id) or {}
        layer = ((found.get("GraphDriver") or {}).get("Data") or {}).get("UpperDir") or ""
        if not os.access(layer, os.R_OK):
            return None
        volumes = [mount["Source"] for mount in found.get("Mounts", ()) if mount["Type"] == "volume"]
        on_disk = [Path(volume) for volume in volumes if not os.path.ismount(volume)]  # noqa: ASYNC240
        own = Path(found["HostsPath"]).parent  # /etc/hosts and the like are files apart
        return Written((Path(layer), own, *on_disk), int(found["State"]["Pid"]))

    async def look(self) -> str:
        """Return ``"paused"`` if it is; empty otherwise.

        Raises:
            DaemonError: The daemon does not answer.
        """
        found = await self._daemon.inspect(self.id)
        return "paused" if found is not None and found["State"].get("Paused") else ""

    async def cause(self, survived: Survived) -> Cause:
        """Say why it is gone; takes at most 2 s."""
        lines = self.stream.stderr.decode(errors="replace").strip().splitlines() or [""]
        with anyio.move_on_after(_CAUSE_S):
            while True:
                try:
                    why = await self._cause(lines[-1][-_LINE_CHARACTERS:], survived)
                except DaemonError as error:
                    return Cause(CauseKind.BACKEND_LOST, str(error))
                if why is not None:
                    return why
                await anyio.sleep(0.02)  # the daemon writes it down a moment after the streams end
        return Cause(CauseKind.BACKEND_LOST, "its streams ended")

    async def _cause(self, last_line: str, survived: Survived) -> Cause | None:
        found = await self._daemon.inspect(self.id)
        out_of_memory = Cause(CauseKind.OUT_OF_MEMORY, "out of memory", by_agent=self._daemon.tells_memory_limit)
        why: Cause | None = Cause(CauseKind.BACKEND_LOST, "removed")
        if found is not None:
            suspected = None if survived.oom_kills else out_of_memory
            why = container_config.cause(found["State"], last_line, out_of_memory=suspected)
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
    """Whether only process 1 is to change OOM scores, which needs us to be root on the daemon's machine."""
    return _is_open(daemon) and spec.profile == "strict" and spec.runtime is None


def shared(daemon: Daemon) -> tuple[str, ...]:
    """Return which kernel resources a daemon's sandboxes share, with each other and its users 1000 and 1001."""
    return SHARED_PER_UID if _is_open(daemon) else (*SHARED_PER_UID, "terminals")


def _is_open(daemon: Daemon) -> bool:
    """Whether we are root on what is probably the daemon's machine."""
    return daemon.is_near and os.geteuid() == 0


async def volumes(daemon: Daemon, container_id: str) -> Mapping[str, Path]:
    """Return where on this host a container's volumes are, by their names inside; none where we cannot see that."""
    if not _is_open(daemon):
        return {}
    found = await daemon.inspect(container_id) or {}
    return {
        mount["Destination"]: Path(mount["Source"])
        for mount in found.get("Mounts", ())
        if os.path.ismount(mount["Source"])  # noqa: ASYNC240 - nothing there to wait for
    }


def knock(volumes: Mapping[str, Path]) -> socket.socket:
    """Return a connected, non-blocking stream to the box that stays whose volumes are these.

    Raises:
        SandboxError: They cannot be seen from here.
        UnreachableError: Nobody opens.
    """
    if CONTROL_DIR not in volumes:
        raise SandboxError(NO_WAY_BACK)
    return run_dirs.connect(volumes[CONTROL_DIR], CONTROL_SOCKET)


async def run(daemon: Daemon, options: Mapping[str, JSON], opening: bytes) -> AttachedContainer:
    """Make, attach to and start a container, and write `opening` to its process 1.

    Raises:
        MissingProgramError: The image has no such program.
        DaemonError: It cannot be made or started for another reason.
    """
    made = cast("dict[str, str]", options["Labels"])
    container_id = await daemon.create(options, orphans.underway(made))
    stream: AttachStream | None = None
    try:
        stream = await daemon.attach(container_id)
        removes_itself = bool(cast("Mapping[str, JSON]", options["HostConfig"])["AutoRemove"])
        held = AttachedContainer(daemon, container_id, stream, removes_itself=removes_itself)
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
    return held
